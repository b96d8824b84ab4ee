"""``PadToSizes``: sequences in few lengths."""

import pytest
import torch

import poptorch
from helpers.wrapping import options

SAMPLES = [
    {"tokens": list(range(1, count + 1)), "labels": torch.full((count,), 7), "kind": count % 2}
    for count in (2, 3, 4, 6)
]
FILL = {"tokens": 0, "labels": -100}


def test_a_batch_gets_the_smallest_size_that_holds_it_tuples_too() -> None:
    collate = poptorch.PadToSizes([8, 4], FILL)
    short, long = collate(SAMPLES[:2]), collate(SAMPLES[2:])
    assert short["tokens"].tolist() == [[1, 2, 0, 0], [1, 2, 3, 0]]
    assert short["labels"].tolist() == [[7, 7, -100, -100], [7, 7, 7, -100]]
    assert (short["kind"].tolist(), long["tokens"].shape) == ([0, 1], (2, 8))
    assert SAMPLES[0]["tokens"] == [1, 2]
    samples = [(torch.ones(count, 3), count) for count in (1, 2)]
    frames, counts = poptorch.PadToSizes([4], {0: -1})(samples)
    assert (frames.shape, frames[0, 0].tolist()) == ((2, 4, 3), [1, 1, 1])
    assert (frames[0, 1:].unique().tolist(), counts.tolist()) == ([-1], [1, 2])


def test_a_program_for_each_size() -> None:
    chosen = options().programs(2)
    collate = poptorch.PadToSizes([4, 8], FILL)
    loader = poptorch.DataLoader(chosen, SAMPLES, batch_size=2, collate_fn=collate)
    wrapper = poptorch.inferenceModel(
        lambda tokens, labels, kind: (tokens.sum(1) + kind, labels.ne(-100).sum(1)), chosen
    )
    sums, counts = zip(*(wrapper(**batch) for batch in loader), strict=True)
    assert torch.cat(sums).tolist() == [3, 7, 10, 21]
    assert torch.cat(counts).tolist() == [2, 3, 4, 6]


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"longer than all sizes(?s:.)*6; sizes \[4\]"):
        poptorch.PadToSizes([4], FILL)(SAMPLES)
    for sizes, fill in (([], FILL), ([0], FILL), ([4], {})):
        with pytest.raises(poptorch.Error, match="needs lengths and what to pad"):
            poptorch.PadToSizes(sizes, fill)
