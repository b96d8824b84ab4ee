"""Blocks to stages and chips; where tensors live; cutting the graph into one piece per stage."""

from .moves import find_moves
from .place import place
from .split import split
from .split_update import split_update, update_homes

__all__ = ["find_moves", "place", "split", "split_update", "update_homes"]
