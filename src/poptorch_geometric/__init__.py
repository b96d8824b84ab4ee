"""Graph networks with fixed shapes: padded batches of graphs for wrapped models.

Needs the package torch_geometric. Source: PopTorch user guide, "PopTorch ops".
"""

from .collate import make_exclude_keys
from .dataloader import FixedSizeDataLoader
from .fixed_size_options import FixedSizeOptions, FixedSizeStrategy, OverSizeStrategy
from .types import PyGArgsParser, registerCustomArgParsers

__all__ = [
    "FixedSizeDataLoader",
    "FixedSizeOptions",
    "FixedSizeStrategy",
    "OverSizeStrategy",
    "PyGArgsParser",
    "make_exclude_keys",
    "registerCustomArgParsers",
]

registerCustomArgParsers()
