"""Blocks to stages and chips; where tensors live; cutting the graph into one piece per stage."""

from .log_lines import log_layout, operator_names
from .moves import find_moves
from .place import place
from .split import split
from .split_update import split_update, update_homes

__all__ = [
    "find_moves",
    "log_layout",
    "operator_names",
    "place",
    "split",
    "split_update",
    "update_homes",
]
