"""``ctc_beam_search_decoder`` against sums over all alignments."""

import itertools
import math
from typing import NamedTuple

import pytest
import torch

from helpers.closeness import FUNCTION, relative
from helpers.wrapping import Having, agrees, trains_alike
from poptorch import ctc_beam_search_decoder

STEPS, SAMPLES, CLASSES, PATHS, BLANK = 5, 3, 3, 4, 2
LENGTHS = [5, 3, 1]


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


class Decoded(NamedTuple):
    """Scores of three samples, and their four best paths with a beam that drops none."""

    scores: torch.Tensor
    probability: torch.Tensor
    length: torch.Tensor
    path: torch.Tensor

    def expected(self, sample: int) -> list[tuple[float, tuple[int, ...]]]:
        """Return all paths of a sample, best first."""
        return every_path(self.scores[: LENGTHS[sample], sample], BLANK)


@pytest.fixture(scope="module")
def decoded() -> Decoded:
    """Return what a wide beam finds in random scores."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(STEPS, SAMPLES, CLASSES, generator=generator).mul(2).log_softmax(-1)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    def decode(p: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        return ctc_beam_search_decoder(p, n, BLANK, 1000, PATHS)

    return Decoded(scores, *agrees(decode, scores, lengths))


def test_the_decoder_returns_probabilities_lengths_and_paths(decoded: Decoded) -> None:
    assert decoded.probability.dtype == torch.float32
    assert decoded.length.dtype == torch.int32
    assert decoded.probability.shape == (SAMPLES, PATHS)
    assert decoded.length.shape == (SAMPLES, PATHS)
    assert decoded.path.shape == (SAMPLES, PATHS, STEPS)


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_decoded_paths_are_exact_with_a_wide_beam(decoded: Decoded, sample: int) -> None:
    rounded = relative(STEPS * 2 * FUNCTION)  # each step has an exponential and a logarithm
    for rank, (score, labels) in enumerate(decoded.expected(sample)[:PATHS]):
        padding = [BLANK] * (STEPS - len(labels))

        assert decoded.probability[sample, rank].item() == pytest.approx(score, rel=rounded)
        assert decoded.length[sample, rank] == len(labels)
        assert decoded.path[sample, rank].tolist() == [*labels, *padding]


@pytest.mark.parametrize("sample", range(SAMPLES))
def test_paths_that_do_not_exist_have_no_probability(decoded: Decoded, sample: int) -> None:
    """A sample of one step has three paths, and the others more than four."""
    missing = decoded.probability[sample, len(decoded.expected(sample)) :].tolist()

    assert missing == [-math.inf] * (1 if LENGTHS[sample] == 1 else 0)


@pytest.mark.spec("ops", 29)
def test_a_narrow_beam_still_finds_a_clear_path() -> None:
    labels = torch.tensor([1, 1, 0, 1, 2, 2, 0, 3])
    scores = torch.full((8, 1, 4), -8.0).scatter(2, labels.view(8, 1, 1), -0.01)

    _, length, path = ctc_beam_search_decoder(scores.half(), torch.tensor([8]), beam_width=2)

    assert path[0, 0, : length.item()].tolist() == [1, 1, 2, 3]


@pytest.mark.spec("ops", 29)
def test_a_single_path_has_its_own_dimension() -> None:
    scores = torch.zeros(8, 1, 4).log_softmax(-1).half()

    probability, _, path = ctc_beam_search_decoder(scores, torch.tensor([8]), beam_width=2)

    assert probability.dtype == torch.float16
    assert probability.shape == (1, 1)
    assert path.shape == (1, 1, 8)


def decoded_and_trained(
    model: Having, x: torch.Tensor, lengths: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return decoded paths, and a loss of the scores that they are decoded from."""
    scores = model.layer(x).log_softmax(-1)
    paths = ctc_beam_search_decoder(scores, lengths)[2]
    return paths, torch.nn.functional.mse_loss(scores, target)


def test_gradients_pass_by_the_decoder() -> None:
    model = Having(decoded_and_trained, layer=torch.nn.Linear(3, 3))

    trains_alike(model, torch.randn(4, 2, 3), torch.tensor([4, 4]), torch.randn(4, 2, 3), lr=0.001)
