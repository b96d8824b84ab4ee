"""What every room may use: errors, the environment table, source locations, the log."""

VERSION = "0.1.0"
