"""Divide, combine and fetch batches, in the user's process or in a loading process."""
