"""Blocks to stages and chips; where tensors live; cutting the graph into one piece per stage."""

from .place import place

__all__ = ["place"]
