"""Implement the commands ``poptorch``, ``poprun``, ``gc-monitor`` and ``gc-info``."""
