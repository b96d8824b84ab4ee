"""Assign blocks to stages and chips, and tensors to chips, and cut the graph into a piece for each
stage.
"""

from .balance import ChipShare, balance, cut_at, find_units
from .early_gradients import early
from .place import check_batches, log_layout, place
from .split import split, split_update, update_homes
from .streaming import find_streaming
