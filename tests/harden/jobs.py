"""Processes and launchers killed at any moment; ``benchmarks/kills.py`` has the trials."""

from kills import trial as trial
