"""Compile functions instead of modules, under the names of releases 2.5 and 2.6."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from ._base.errors import Unsupported
from .enums import Compiler
from .options import Options
from .wrappers import _Function, inferenceModel


def IPUContext(
    func: Callable[..., Any] | None = None,
    *,
    compiler: Compiler = Compiler.MLIR,
    options: Options | None = None,
    model: nn.Module | None = None,
) -> Any:
    """Compile a function of tensors, as ``inferenceModel`` does. Also usable as a decorator.

    Args:
        func: takes and returns tensors.
        compiler: has no effect.
        options: the options of the program.
        model: the module that ``func`` calls. The program uses the weights of this module.
    """
    if func is None:
        return functools.partial(IPUContext, compiler=compiler, options=options, model=model)
    module: Any = functools.update_wrapper(_Function(func), func)
    module.model = model
    return inferenceModel(module, options)


class IPUScope:
    """Raise an error: a program can only be made from a function, not from the lines of a block.

    Raises:
        NotImplementedError: always.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise Unsupported(
            "poptorch.experimental.IPUScope is not supported",
            fix=(
                "move the block into a function: compiled = "
                "poptorch.experimental.IPUContext(function, model=model)"
            ),
        )
