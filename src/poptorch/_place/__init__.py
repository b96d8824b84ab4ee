"""Blocks to stages and chips; where tensors live; cutting the graph into one piece per stage."""

from .balance import Share, balance
from .devices import check_batches
from .early import early
from .log_lines import log_layout, operator_names
from .place import place
from .split import split
from .split_update import split_update, update_homes
from .streaming import find_streaming
from .units import cut_at, find_units

__all__ = [
    "Share",
    "balance",
    "check_batches",
    "cut_at",
    "early",
    "find_streaming",
    "find_units",
    "log_layout",
    "operator_names",
    "place",
    "split",
    "split_update",
    "update_homes",
]
