"""Operators without a counterpart in torch, captured and native, against their definitions."""

import itertools
import math

import pytest
import torch

import poptorch
from helpers.closeness import FUNCTION, relative
from helpers.wrapping import Calling, Having, Scaled, agrees, options, trains_alike

decoder = poptorch.ctc_beam_search_decoder


def farthest(points: torch.Tensor, count: int, first: int = 0) -> list[int]:
    """Pick points by the definition."""
    picked = [first]
    while len(picked) < count:
        gaps = [min((p - points[q]).norm().item() for q in picked) for p in points]
        picked.append(gaps.index(max(gaps)))
    return picked


def nearest(x, y, batch_x, batch_y) -> list[int]:
    gaps = (x[:, None] - y).norm(dim=-1)
    gaps[torch.tensor(batch_x)[:, None] != torch.tensor(batch_y)] = math.inf
    return gaps.argmin(1).tolist()


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_fps_picks_the_farthest_points_of_each_segment(ratio: float) -> None:
    src, ptr = torch.randn(13, 3), [0, 5, 6, 13]
    expected = []
    for start, end in itertools.pairwise(ptr):
        own = farthest(src[start:end], math.ceil((end - start) * ratio))
        expected += [start + at for at in own]
    result = agrees(lambda x: poptorch.fps(x, ptr, ratio), src)
    assert (result.dtype, result.tolist()) == (torch.int32, expected)
    points = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])
    assert poptorch.fps(points, [0, 4], 0.75).tolist() == [0, 1, 2]  # the first of equals


def test_fps_may_start_anywhere() -> None:
    src, ptr = torch.randn(40, 2), [0, 20, 40]
    anywhere = Calling(lambda x: poptorch.fps(x, ptr, 0.2, random_start=True))
    model = poptorch.inferenceModel(anywhere, options().randomSeed(1))
    starts = set()
    for _ in range(8):
        picked = model(src).tolist()
        for segment, (low, own) in enumerate(((0, picked[:4]), (20, picked[4:]))):
            assert [at - low for at in own] == farthest(src[low : low + 20], 4, own[0] - low)
            starts.add((segment, own[0]))
    assert len(starts) > 4


@pytest.mark.parametrize(
    "features, form", [(3, "none"), (1, "lists"), (3, "tensors"), (3, "mixed")]
)
def test_nearest_looks_within_the_batch(features: int, form: str) -> None:
    x, y = torch.randn(7, features), torch.randn(9, features)
    numbers_x, numbers_y = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2]
    batch_x = {"lists": numbers_x, "none": None}.get(form, torch.tensor(numbers_x))
    batch_y = {"tensors": torch.tensor(numbers_y), "none": None}.get(form, numbers_y)
    if form == "none":
        numbers_x, numbers_y = [0] * 7, [0] * 9
    expected = nearest(x, y, numbers_x, numbers_y)
    if features == 1:
        x, y = x[:, 0], y[:, 0]
    found = agrees(lambda a, b: poptorch.nearest(a, b, batch_x, batch_y), x, y, check_dtype=False)
    assert (found.tolist(), found.dtype) == (expected, torch.int32)
    if form == "none":  # also of one side only, and in half precision
        assert poptorch.nearest(x.half(), x.half(), batch_x, [0] * 7).tolist() == [*range(7)]


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


def test_decoded_paths_are_exact_with_a_wide_beam() -> None:
    blank = 2
    scores = torch.randn(5, 3, 3).mul(2).log_softmax(-1)
    lengths = torch.tensor([5, 3, 1], dtype=torch.int32)
    results = agrees(lambda p, n: decoder(p, n, blank, 1000, 4), scores, lengths)
    probability, length, path = results
    assert [r.dtype for r in results[:2]] == [torch.float32, torch.int32]
    assert [r.shape for r in results] == [(3, 4), (3, 4), (3, 4, 5)]
    for sample, rank in itertools.product(range(3), range(4)):
        expected = every_path(scores[: lengths[sample], sample], blank)
        if rank >= len(expected):
            assert probability[sample, rank] == -math.inf
            continue
        score, labels = expected[rank]
        rounded = relative(5 * 2 * FUNCTION)  # of five steps, an exponential and a logarithm each
        assert probability[sample, rank].item() == pytest.approx(score, rel=rounded)
        assert length[sample, rank] == len(labels)
        assert path[sample, rank].tolist() == [*labels, *[blank] * (5 - len(labels))]


@pytest.mark.spec("ops", 29)
def test_a_narrow_beam_still_finds_a_clear_path() -> None:
    labels = torch.tensor([1, 1, 0, 1, 2, 2, 0, 3])
    scores = torch.full((8, 1, 4), -8.0).scatter(2, labels.view(8, 1, 1), -0.01)
    probability, length, path = decoder(scores.half(), torch.tensor([8]), beam_width=2)
    assert probability.dtype == torch.float16
    assert (probability.shape, path.shape) == ((1, 1), (1, 1, 8))  # one path has its dimension
    assert path[0, 0, : length.item()].tolist() == [1, 1, 2, 3]


def sliced(x, start):
    return (poptorch.dynamic_slice(x, 1, start, 3, 2), poptorch.dynamic_slice(x, -1, start, 4, 1),
            poptorch.dynamic_update(x, torch.full((2, 6), -1.0), 0, start, 2), x)  # fmt: skip


@pytest.mark.spec("ops", 12, 13)
@pytest.mark.parametrize("dtype, shape", [(torch.int16, (1,)), (torch.int64, ())])
def test_the_start_of_a_slice_is_read_at_run_time(dtype: torch.dtype, shape) -> None:
    """A window goes on at the beginning; an update is in a copy."""
    # An input of no dimensions cannot be cut into micro-batches, but one call needs none.
    model, x = poptorch.inferenceModel(Calling(sliced), options()), torch.arange(24.0).view(4, 6)
    for start in (2, 4):
        at = torch.full(shape, start, dtype=dtype)
        updated = x.clone()
        updated[[start % 4, (start + 1) % 4]] = -1
        over = torch.cat([x, x], 1)
        wanted = over[:, start : start + 3 : 2], over[:, start : start + 4], updated, x
        for results in (model(x, at), sliced(x, at)):
            torch.testing.assert_close(results, wanted, rtol=0, atol=0)


def decoded(model, x, lengths, target):
    scores = model.layer(x).log_softmax(-1)
    return decoder(scores, lengths)[2], torch.nn.functional.mse_loss(scores, target)


@pytest.mark.parametrize("model, inputs", [
    (Scaled(lambda x: x[poptorch.fps(x, [0, 4], 0.5)]), [torch.arange(4.0).square()[:, None]]),
    (Scaled(lambda x, start: poptorch.dynamic_update(
        x, poptorch.dynamic_slice(x, 0, start, 2, 1) * 3, 0, start, 2)),
     [torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([1])]),
    (Having(decoded, layer=torch.nn.Linear(3, 3)),
     [torch.randn(4, 2, 3), torch.tensor([4, 4]), torch.randn(4, 2, 3)]),
])  # fmt: skip
def test_gradients_flow_through_or_pass_by(model, inputs) -> None:
    trains_alike(model, *inputs, lr=0.001)
