"""Wrap a PyTorch model: each call then runs one compiled program.

    trainingModel(model, options, optimizer)   a call does forward, backward and update
    inferenceModel(model, options)             a call does forward
    Options()                                  iterations, accumulation, replicas, precision

DataLoader assembles batches of the size that the options require. BeginBlock and Block place layers
on chips. optim contains the optimizers. estimate predicts the cost of a program on IPUs.
help(poptorch.Options) explains every option, and help() works for every other name as well.
"""

from . import autocasting, enums, experimental, ops, optim, options, profiling
from ._base import VERSION as _VERSION
from ._base import env as _env
from ._base import log as _log
from ._base.errors import Error, RecoverableError, UnrecoverableError
from ._capture import OverwriteContextManager as _OverwriteContextManager
from ._checkpoints import Checkpoints
from ._planning.planning import Estimate, autoplace, estimate, what_if
from .argparsers import ICustomArgParser, registerCustomArgParser, registerGeometricCustomArgParsers
from .dataloader import AsynchronousDataAccessor, DataLoader, PadToSizes
from .enums import *  # noqa: F403 (its __all__ is every enum)
from .executor import PoplarExecutor
from .hardware import ipuHardwareIsAvailable, ipuHardwareVersion
from .ops import *  # noqa: F403 (its __all__ is PopTorch's contract)
from .ops import print as print
from .options import *  # noqa: F403 (its __all__ is PopTorch's contract)
from .poptorch_core import createPoptorchError
from .wrappers import (
    inferenceModel,
    load,
    registerPostCompileHook,
    registerPreCompileHook,
    trainingModel,
)

# Names that `from poptorch import *` imports. Modules are left out, because a script may have its
# own `options` and use torch's `optim`. `poptorch.print` is left out, because it would replace
# Python's `print`.
__all__ = [
    "AsynchronousDataAccessor", "Checkpoints", "DataLoader", "Error", "Estimate",
    "ICustomArgParser", "PadToSizes", "PoplarExecutor", "RecoverableError",
    "UnrecoverableError", "autoplace", "createPoptorchError", "estimate", "inferenceModel",
    "ipuHardwareIsAvailable", "ipuHardwareVersion", "load", "registerCustomArgParser",
    "registerGeometricCustomArgParsers", "registerPostCompileHook", "registerPreCompileHook",
    "setLogLevel", "trainingModel", "what_if",
]  # fmt: skip
__all__ += enums.__all__
__all__ += ops.__all__
__all__ += options.__all__
__all__.remove("print")

__version__ = _VERSION


def __dir__() -> list[str]:
    """Return the public names, for completion and ``help``."""
    modules = ["autocasting", "enums", "experimental", "ops", "optim", "options", "profiling"]
    return [*__all__, "__version__", "print", *modules]


setLogLevel = _log.set_level
_log.setup()
_env.set_if_absent("RDMAV_FORK_SAFE", "1")  # data workers fork
