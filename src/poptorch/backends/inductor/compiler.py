"""One graph through torch's compiler."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import fx

Compiled = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def compile_graph(module: fx.GraphModule, examples: list[torch.Tensor]) -> Compiled:
    """Compile a graph of ATen operators with trailing writes into its inputs.

    Args:
        module: takes the tensors one by one, returns a tuple.
        examples: tensors of the sizes to compile for.
    """
    with warnings.catch_warnings():
        # Modules of torch's compiler use, as they load, names that torch itself deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.compile_fx")
    from torch import _inductor
    from torch._inductor import config

    with config.patch(fallback_random=True):  # random numbers equal the reference backend's
        compiled = _inductor.standalone_compile(
            module, list(examples), dynamic_shapes="from_example_inputs"
        )
    return lambda arguments: compiled(*arguments)
