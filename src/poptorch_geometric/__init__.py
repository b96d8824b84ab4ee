"""Pad batches of graphs to fixed shapes, so that wrapped models can process them.

This needs the package torch_geometric, but none of its plug-ins. Source: PopTorch user guide,
"PopTorch ops".
"""

import warnings as _warnings

from poptorch import __version__, _OverwriteContextManager  # type: ignore[attr-defined]

try:
    with _warnings.catch_warnings():  # importing torch_geometric always scripts two of its classes
        _warnings.filterwarnings("ignore", r"`torch\.jit\.script` is deprecated")
        import torch_geometric as _torch_geometric  # noqa: F401
except ModuleNotFoundError as _error:
    _error.add_note('  Fix:    pip install "poptorch[graphs]"')
    raise

from . import _substitution
from .collate import make_exclude_keys
from .common import call_once as call_once
from .dataloader import FixedSizeDataLoader
from .fixed_size_options import FixedSizeOptions
from .pyg_dataloader import FixedSizeStrategy, OverSizeStrategy
from .types import PyGArgsParser, registerCustomArgParsers
from .utils import TrainingStepper, set_aggregation_dim_size

__all__ = [  # noqa: RUF022 (the loaders first)
    "FixedSizeDataLoader",
    "FixedSizeOptions",
    "FixedSizeStrategy",
    "OverSizeStrategy",
    "TrainingStepper",
    "set_aggregation_dim_size",
    "make_exclude_keys",
    "PyGArgsParser",
    "__version__",
]

registerCustomArgParsers()
_OverwriteContextManager.registerSubsitutionManager(_substitution.substituted)
