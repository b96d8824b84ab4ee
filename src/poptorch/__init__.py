"""The PopTorch API on today's torch."""

__version__ = "0.1.0"
