"""Provide what every package may use: errors, environment variables, source locations, the log."""

VERSION = "0.2.0"
