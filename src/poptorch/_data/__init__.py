"""Divide, combine and fetch batches, in this process or in a loading process."""
