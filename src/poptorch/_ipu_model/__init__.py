"""Estimate what a plan would cost on IPUs: time, memory, simulation, and reports."""
