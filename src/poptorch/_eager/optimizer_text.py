"""Describe the user's optimizer in a text: all that its updates in eager PyTorch depend on, except
for tensors and learning rates.

A program whose update agreed with an optimizer need not be compared with another optimizer that has
the same text.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from .._ir.traced_step import StepHooks

_ATOMS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)
# what torch adds to each optimizer, and a scheduler's wrapper of its step
_LEFT_OUT = {"state", "param_groups", "step"}
_HOOKS_OF_STATE = ("_optimizer_state_dict_", "_optimizer_load_state_dict_")


class _NoText(Exception):  # noqa: N818 (it says what is the case)
    """A value has no text form that describes it completely."""


def text_of(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the text; None if the optimizer holds something that has none, such as a module."""
    kind = type(optimizer)
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in _LEFT_OUT and not name.startswith(_HOOKS_OF_STATE)
    }
    try:
        content = [_plain(attributes), _plain(optimizer.param_groups)]
    except _NoText:
        return None
    return json.dumps([kind.__module__, kind.__qualname__, *content])


def _plain(value: Any, name: str = "") -> Any:
    if name.endswith("lr") and isinstance(value, int | float):
        return f"zero: {value == 0}"  # schedules change it
    if isinstance(value, _ATOMS):
        return repr(value)
    if isinstance(value, torch.Tensor):
        return ["tensor", list(value.shape), str(value.dtype)]
    if isinstance(value, dict):
        return [[_plain(key), _plain(each, str(key))] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, StepHooks):
        return _plain([value.before, value.after])
    raise _NoText
