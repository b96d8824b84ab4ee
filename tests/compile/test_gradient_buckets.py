"""Gradients travel between processes in buckets of one type."""

import torch

from poptorch._compile import gradient_buckets
from poptorch._ir import slots
from poptorch._ir.slots import Kind, Slot

MOST = 1 << 20


def accumulator(name: str, size: float, dtype: torch.dtype = torch.float32) -> Slot:
    """Return an accumulator of ``size`` x MOST bytes."""
    return Slot(Kind.ACCUM, (int(size * MOST) // dtype.itemsize,), dtype, name)


def test_gradients_are_reduced_in_buckets_of_limited_size_and_one_dtype() -> None:
    accums = [accumulator(*each) for each in zip("abcd", (0.6, 0.3, 0.6, 2), strict=True)]
    half = accumulator("e", 0.1, torch.float16)
    buckets = gradient_buckets._buckets([*accums[:2], half, *accums[2:]], MOST, 3)
    assert [[m.slot.path for m in b.members] for b in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [b.slot for b in buckets] == [
        slots.exchanged(at, b.slot.numel, b.slot.dtype) for at, b in enumerate(buckets, 3)
    ]
    assert [b.slot.dtype for b in buckets] == [torch.float32] * 3 + [torch.float16]
    assert all(b.slot.bytes <= MOST or len(b.members) == 1 for b in buckets)
