"""Define the values that packages exchange, their rules and their text forms."""
