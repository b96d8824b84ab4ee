"""Define the values that rooms exchange, their rules and their text forms."""
