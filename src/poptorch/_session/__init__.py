"""Manage one wrapped model: its arguments, compilation, calls, weights, files and reports."""
