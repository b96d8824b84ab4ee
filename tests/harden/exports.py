"""Drawn modules as exported Python: the bits of the reference backend, or refused before."""

import functools
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

import poptorch
from helpers import exported
from helpers.eager_loop import plain, wrapped

from .modules import Model, batches, drawn

EXACT = {"rtol": 0, "atol": 0, "equal_nan": True}


def trial(number: int) -> Iterator[Any]:
    case = replace(drawn(number), backend="reference")
    given = batches(case)
    with (
        tempfile.TemporaryDirectory() as folder,
        wrapped(functools.partial(Model, case), case) as ours,
    ):
        file = Path(folder, "step.py")
        try:
            ours.wrapper.compile(*given[0])
        except (poptorch.Error, RuntimeError):  # as eager torch does: modules.py compares that
            yield "not compiled", None
            return
        ours.wrapper.export(file)
        try:
            expected = [ours(*batch) for batch in given]
        except (poptorch.Error, RuntimeError):
            yield "refused", None
            return
        step = exported.loaded(file)
        state, _ = step.load(file.with_suffix(".safetensors"))
        got = [step.step(*state, *batch) for batch in given]
        trained = exported.of_model(step, state)
        try:
            torch.testing.assert_close(_tensors(got), _tensors(map(plain, expected)), **EXACT)
            for key, value in ours.state().items():
                if key in trained:  # the module has the first replica's buffers
                    own = trained[key] if trained[key].shape == value.shape else trained[key][0]
                    torch.testing.assert_close(own, value, **EXACT)
        except AssertionError as error:
            yield "other bits", f"{case}: {' '.join(str(error).split())}"
        else:
            yield "same", None


def _tensors(results: Any) -> list[torch.Tensor]:
    return [each for each in pytree.tree_leaves(list(results)) if each is not None]
