"""Blocks to stages and chips; where tensors live; cutting the graph into one piece per stage."""

from .balance import Share, balance, cut_at, find_units
from .early import early
from .place import check_batches, log_layout, place
from .split import split, split_update, update_homes
from .streaming import find_streaming
