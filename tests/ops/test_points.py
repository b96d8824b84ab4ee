"""``fps`` and ``nearest``."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, infer, options


def plain_fps(points: torch.Tensor, count: int, first: int) -> list[int]:
    """Pick by the definition."""
    picked = [first]
    while len(picked) < count:
        gaps = [min((p - points[q]).norm().item() for q in picked) for p in points]
        picked.append(gaps.index(max(gaps)))
    return picked


@pytest.mark.parametrize("ratio", [0.3, 0.5, 1.0])
def test_fps_picks_the_farthest_points_of_each_segment(ratio: float) -> None:
    src, ptr = torch.randn(13, 3), [0, 5, 6, 13]
    expected = []
    for start, end in itertools.pairwise(ptr):
        own = plain_fps(src[start:end], math.ceil((end - start) * ratio), 0)
        expected += [start + at for at in own]
    for result in (
        infer(lambda x: poptorch.fps(x, ptr, ratio), src),
        poptorch.fps(src, ptr, ratio),
    ):
        assert result.dtype == torch.int32
        assert result.tolist() == expected


def test_fps_takes_the_first_of_equals() -> None:
    assert poptorch.fps(torch.tensor([[0.0], [1.0], [-1.0], [1.0]]), [0, 4], 0.75).tolist() == [
        0,
        1,
        2,
    ]


def test_fps_may_start_anywhere() -> None:
    src, ptr = torch.randn(40, 2), [0, 20, 40]
    model = poptorch.inferenceModel(
        Calling(lambda x: poptorch.fps(x, ptr, 0.2, random_start=True)), options().randomSeed(1)
    )
    starts = set()
    for _ in range(8):
        picked = model(src).tolist()
        for segment, (low, own) in enumerate(((0, picked[:4]), (20, picked[4:]))):
            assert [at - low for at in own] == plain_fps(src[low : low + 20], 4, own[0] - low)
            starts.add((segment, own[0]))
    assert len(starts) > 4


def test_fps_indices_select_in_the_model_and_gradients_pass_by() -> None:
    class Sampled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            x = x * self.weight
            chosen = x[poptorch.fps(x, [0, 4], 0.5)]
            return chosen, poptorch.identity_loss(chosen, "sum")

    model = Sampled()
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=1.0))
    chosen, _ = executor(torch.tensor([[1.0], [2.0], [3.0], [9.0]]))
    assert chosen.flatten().tolist() == [1.0, 9.0]
    assert model.weight == 1 - 10


@pytest.mark.spec("ops", 26)
@pytest.mark.parametrize(
    "arguments, phrase",
    [
        (([[1.0]], [0, 1]), "src must be a torch"),
        ((torch.ones(3), [0, 3]), "2-dimensional"),
        ((torch.ones(3, 1), (0, 3)), "ptr must be a list"),
        ((torch.ones(3, 1), [0]), "ptr must be a list"),
        ((torch.ones(3, 1), [0, 2]), "ptr must be a list"),
        ((torch.ones(3, 1), [0, 2, 2, 3]), "ptr must be a list"),
        ((torch.ones(3, 1), [0, 3], 1), "ratio must be a float"),
        ((torch.ones(3, 1), [0, 3], 0.0), "ratio must be a float"),
        ((torch.ones(3, 1), [0, 3], 1.5), "ratio must be a float"),
        ((torch.ones(3, 1), [0, 3], 0.5, 1), "random_start must be a bool"),
    ],
)
def test_fps_arguments_are_checked(arguments: tuple, phrase: str) -> None:
    with pytest.raises(poptorch.Error, match=phrase):
        poptorch.fps(*arguments)


def by_definition(x, y, batch_x, batch_y) -> list[int]:
    found = []
    for point, batch in zip(x, batch_x, strict=True):
        gaps = [
            (point - other).norm().item() if b == batch else math.inf
            for other, b in zip(y, batch_y, strict=True)
        ]
        found.append(gaps.index(min(gaps)))
    return found


@pytest.mark.parametrize("features", [1, 3])
@pytest.mark.parametrize("form", ["none", "lists", "tensors", "mixed"])
def test_nearest_looks_within_the_batch(features: int, form: str) -> None:
    x, y = torch.randn(7, features), torch.randn(9, features)
    numbers_x, numbers_y = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2]
    batch_x = {"lists": numbers_x, "none": None}.get(form, torch.tensor(numbers_x))
    batch_y = {"tensors": torch.tensor(numbers_y), "none": None}.get(form, numbers_y)
    if form == "none":
        numbers_x, numbers_y = [0] * 7, [0] * 9
    expected = by_definition(x, y, numbers_x, numbers_y)
    if features == 1:
        x, y = x[:, 0], y[:, 0]
    native = poptorch.nearest(x, y, batch_x, batch_y)
    captured = infer(lambda a, b: poptorch.nearest(a, b, batch_x, batch_y), x, y)
    assert native.tolist() == expected
    assert captured.tolist() == expected
    assert captured.dtype == torch.int32


def test_nearest_takes_half_precision_and_one_sided_batches() -> None:
    x, y = torch.tensor([[0.0], [5.0]]).half(), torch.tensor([[4.0], [1.0]]).half()
    assert poptorch.nearest(x, y, [0, 0], []).tolist() == [1, 0]
    assert poptorch.nearest(x.double(), y.double(), None, torch.zeros(2)).tolist() == [1, 0]


@pytest.mark.spec("ops", 26)
@pytest.mark.parametrize(
    "arguments, error, phrase",
    [
        (([1.0], torch.ones(1)), poptorch.Error, "x must be a torch"),
        ((torch.ones(1), 1.0), poptorch.Error, "y must be a torch"),
        ((torch.ones(2), torch.ones(2), "01", [0, 1]), poptorch.Error, "list of ints or a tensor"),
        ((torch.ones(1, 1, 1), torch.ones(1)), ValueError, "at most 2 dimensions"),
        ((torch.ones(1, 2), torch.ones(1, 3)), ValueError, "as many features"),
        ((torch.ones(2), torch.ones(2), [0], [0, 1]), ValueError, "one entry per row"),
        ((torch.ones(2), torch.ones(2), [1, 0], [0, 1]), ValueError, "must be sorted"),
        ((torch.ones(2), torch.ones(2), [0, 0], [0, 1]), ValueError, "occur in both"),
        ((torch.ones(2), torch.ones(2), [0, 1], None), ValueError, "occur in both"),
    ],
)
def test_nearest_arguments_are_checked(arguments: tuple, error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        poptorch.nearest(*arguments)
