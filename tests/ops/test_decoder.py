"""The beam search decoder against all alignments, one by one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, options


def every_path(log_probs: torch.Tensor, blank: int) -> list[tuple[float, tuple[int, ...]]]:
    """Log-probability of every label sequence, by summing over all alignments; best first."""
    steps, classes = log_probs.shape
    totals: dict[tuple[int, ...], float] = {}
    for alignment in itertools.product(range(classes), repeat=steps):
        merged = [label for label, _ in itertools.groupby(alignment)]
        path = tuple(label for label in merged if label != blank)
        score = math.exp(sum(log_probs[t, c].item() for t, c in enumerate(alignment)))
        totals[path] = totals.get(path, 0.0) + score
    return sorted(((math.log(p), path) for path, p in totals.items()), reverse=True)


@pytest.mark.parametrize("blank", [0, 2])
def test_paths_and_probabilities_are_exact_with_a_wide_beam(blank: int) -> None:
    torch.manual_seed(3)
    scores = torch.randn(5, 3, 3).mul(2).log_softmax(-1)
    lengths = torch.tensor([5, 3, 1], dtype=torch.int32)
    model = poptorch.inferenceModel(
        Calling(lambda p, n: poptorch.ctc_beam_search_decoder(p, n, blank, 1000, 4)), options()
    )
    for probability, length, path in (
        model(scores, lengths),
        poptorch.ctc_beam_search_decoder(scores, lengths, blank, 1000, 4),
    ):
        assert (probability.dtype, length.dtype) == (torch.float32, torch.int32)
        assert (probability.shape, length.shape, path.shape) == ((3, 4), (3, 4), (3, 4, 5))
        for sample in range(3):
            expected = every_path(scores[: lengths[sample], sample], blank)
            for rank in range(4):
                if rank >= len(expected):
                    assert probability[sample, rank] == -math.inf
                    continue
                score, labels = expected[rank]
                assert probability[sample, rank].item() == pytest.approx(score, rel=1e-5)
                assert length[sample, rank] == len(labels)
                filled = [*labels, *[blank] * (5 - len(labels))]
                assert path[sample, rank].tolist() == filled


def test_a_narrow_beam_still_finds_a_clear_path() -> None:
    labels = [1, 1, 0, 1, 2, 2, 0, 3]
    scores = torch.full((8, 1, 4), -8.0)
    for step, label in enumerate(labels):
        scores[step, 0, label] = -0.01
    _, length, path = poptorch.ctc_beam_search_decoder(scores, torch.tensor([8]), beam_width=2)
    assert length.item() == 4
    assert path[0, 0, :4].tolist() == [1, 1, 2, 3]


@pytest.mark.spec("ops", 29)
def test_one_path_still_has_its_dimension() -> None:
    scores = torch.randn(4, 2, 3).log_softmax(-1).half()
    results = poptorch.ctc_beam_search_decoder(scores, torch.tensor([4, 4]))
    assert [tuple(r.shape) for r in results] == [(2, 1), (2, 1), (2, 1, 4)]
    assert results[0].dtype == torch.float16


def test_arguments_are_checked() -> None:
    scores, lengths = torch.randn(4, 2, 3), torch.tensor([4, 4])
    for arguments, phrase in (
        (([1], lengths), "probs must be a torch"),
        ((scores, [4, 4]), "lengths must be a torch"),
        ((scores[0], lengths), "must be rank-3"),
        ((scores, lengths[:1]), "one entry per sample"),
        ((scores, lengths, 3), "out of range"),
        ((scores, lengths, 0, 2, 3), "out of range"),
    ):
        with pytest.raises(poptorch.Error, match=phrase):
            poptorch.ctc_beam_search_decoder(*arguments)


def test_training_goes_around_it() -> None:
    class Decoding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x, lengths, target):
            scores = self.layer(x).log_softmax(-1)
            _, _, path = poptorch.ctc_beam_search_decoder(scores, lengths)
            return path, torch.nn.functional.mse_loss(scores, target)

    model = Decoding()
    before = model.layer.weight.detach().clone()
    executor = poptorch.trainingModel(model, options())
    path, _ = executor(torch.randn(4, 2, 3), torch.tensor([4, 4]), torch.randn(4, 2, 3))
    assert path.shape == (2, 1, 4)
    assert not torch.equal(before, model.layer.weight)
