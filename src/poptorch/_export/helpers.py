"""Provide the helper functions that an exported file needs: sources from this package that
it runs.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Collection
from typing import Any

from .._base import private
from .._ops import random_streams, recurrent_layers, traceable
from ..backends import fused_steps

_DRAW = '''
def draw(like, generators, fill, *numbers):
    """Draw random numbers for each lane from its own generator."""
    result = torch.empty_like(like)
    for row, source, generator in zip(result, like, generators, strict=True):
        getattr(row, fill)(*(numbers or (source,)), generator=generator)
    return result
'''
_FLAT = '''
def flat(g, parts):
    """Join the gradients of small weights in one tensor, in the layout of the weights."""
    pieces, end = [], 0
    for name, start, _ in parts:
        pieces += [g[name].new_zeros(start - end), g[name].reshape(-1)]
        end = start + g[name].numel()
    return torch.cat([*pieces, pieces[-1].new_zeros(-end % 64)])
'''
_SUMS = '''
def sums(parts, replicas, lanes):
    """Sum the results of each replica; with lanes, each row is the result of one lane."""
    narrow = (torch.bool, torch.uint8, torch.int8, torch.int16)
    parts = [part.int() if part.dtype in narrow else part for part in parts]
    if lanes:
        parts = [part.unflatten(0, (-1, replicas)).sum(0, dtype=part.dtype) for part in parts]
        totals = list(sum(parts[1:], parts[0]))
    else:
        totals = parts[:replicas]
        for at, part in enumerate(parts[replicas:]):
            totals[at % replicas] = totals[at % replicas] + part
    if replicas == 1:
        return totals[0]
    return torch.cat(totals) if totals[0].dim() else torch.stack(totals)
'''


def _kernels(text: str) -> str:
    """Write torch's names in place of the table look-ups in our sources."""

    def name(found: re.Match[str]) -> str:
        table: Any = getattr(fused_steps, found[1])
        path: str = private.ROWS[table[int(found[2])]][0]
        return path.replace(":", ".")

    return re.sub(r"_kernel\((\w+)\[(\d)\]\)", name, text)


_PARTS: dict[str, tuple[Callable[..., Any], ...]] = {
    "adam_step": (fused_steps.adam_step,),
    "sgd_step": (fused_steps._advance, fused_steps.sgd_step),
    "lstm_layer": (recurrent_layers._layer,),
    "lstm_layer_backward": (recurrent_layers._layer_backward,),
    "stepwise_layer": (recurrent_layers._steps,),
    "stepwise_layer_backward": (recurrent_layers._steps_backward,),
    "ctc_losses": (traceable._ctc,),
    "grouped_product": (traceable._grouped_shape, traceable._product),
    "seed": (random_streams.seed,),
}
_CALLED = {
    "_layer": "lstm_layer", "_layer_backward": "lstm_layer_backward", "_ctc": "ctc_losses",
    "_steps": "stepwise_layer", "_steps_backward": "stepwise_layer_backward",
    "_product": "grouped_product", "_advance": "advance", "_grouped_shape": "grouped_shape",
}  # fmt: skip
_CONSTANTS = {"_LSTM": str(recurrent_layers._LSTM), "_LATE": "torch.tensor(1e30)"}
_WRITTEN = {"draw": _DRAW, "flat": _FLAT, "sums": _SUMS}


def sources(used: Collection[str]) -> list[str]:
    """Return the sources of the helpers that some code calls, and of those that they call
    themselves.
    """
    texts = {name: text.strip() for name, text in _WRITTEN.items() if name in used}
    texts |= {
        name: "\n\n\n".join(map(_without_types, functions))
        for name, functions in _PARTS.items()
        if name in used
    }
    return [texts[name] for name in sorted(texts)]


def _without_types(function: Callable[..., Any]) -> str:
    """Return a function's source without names that exist only in this package."""
    text = inspect.getsource(function)
    (tree,) = ast.parse(text).body
    assert isinstance(tree, ast.FunctionDef)
    for each in (*tree.args.args, *([tree.args.vararg] if tree.args.vararg else [])):
        each.annotation = None
    body = "\n".join(text.splitlines()[tree.body[0].lineno - 1 :])
    body = _kernels(re.sub(r"(\w+): tuple\[Any, \.\.\.\] =", r"\1 =", body))
    whole = f"def {tree.name}({ast.unparse(tree.args)}):\n{body}"
    words = {**_CALLED, **_CONSTANTS}
    whole = re.sub(r"\b_\w+\b", lambda found: words.get(found[0], found[0]), whole)
    return whole.replace("='')", '="")')
