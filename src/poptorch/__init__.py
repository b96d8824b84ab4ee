"""The PopTorch API on today's torch: a wrapped model is one compiled program."""

from . import enums, optim, options
from ._base import log as _log
from ._base.errors import Error, RecoverableError, UnrecoverableError
from .argparsers import (
    ICustomArgParser,
    registerCustomArgParser,
    registerGeometricCustomArgParsers,
)
from .dataloader import AsynchronousDataAccessor, DataLoader
from .enums import *  # noqa: F403 (every enum is public at top level)
from .executor import PoplarExecutor
from .ops import *  # noqa: F403 (its __all__ is PopTorch's contract)
from .options import *  # noqa: F403 (its __all__ is PopTorch's contract)
from .wrappers import (
    inferenceModel,
    registerPostCompileHook,
    registerPreCompileHook,
    trainingModel,
)

__version__ = "0.1.0"

setLogLevel = _log.set_level
_log.setup()
