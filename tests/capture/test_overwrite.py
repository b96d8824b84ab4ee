"""Context managers of other packages are entered around captures, and only there."""

from __future__ import annotations

import contextlib

import torch

import poptorch
from helpers.wrapping import Calling, options
from poptorch._capture import OverwriteContextManager


def test_functions_are_swapped_while_a_model_is_captured(monkeypatch) -> None:
    monkeypatch.setattr(OverwriteContextManager, "_managers", [])
    entered = []

    class Replaced:
        """Replaces a function whose shape depends on values."""

        def __enter__(self):
            entered.append(poptorch.isRunningOnIpu())
            self._before, torch.nonzero = torch.nonzero, lambda x: x.bool()

        def __exit__(self, *_):
            torch.nonzero = self._before

    before = torch.nonzero
    for _ in range(2):
        poptorch._OverwriteContextManager.registerSubsitutionManager(Replaced)
    model = poptorch.inferenceModel(Calling(lambda x: torch.nonzero(x)), options())
    assert model(torch.tensor([0.0, 2.0])).tolist() == [False, True]
    assert torch.nonzero is before
    count = len(entered)
    model(torch.ones(2))
    assert len(entered) == count >= 1
    with contextlib.suppress(ZeroDivisionError):
        poptorch.inferenceModel(Calling(lambda x: 1 / 0), options())(torch.ones(2))
    assert torch.nonzero is before
