"""``fps`` and ``nearest`` against their definitions."""

import itertools
import math
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Scaled, agrees, options, trains_alike


def farthest(points: torch.Tensor, count: int, first: int = 0) -> list[int]:
    """Pick points by the definition: the next is the farthest from all that are picked."""
    picked = [first]
    while len(picked) < count:
        gaps = [min((p - points[q]).norm().item() for q in picked) for p in points]
        picked.append(gaps.index(max(gaps)))
    return picked


@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_fps_picks_the_farthest_points_of_each_segment(ratio: float) -> None:
    src, ptr = torch.randn(13, 3), [0, 5, 6, 13]

    picked = agrees(lambda x: poptorch.fps(x, ptr, ratio), src)

    expected = []
    for start, end in itertools.pairwise(ptr):
        own = farthest(src[start:end], math.ceil((end - start) * ratio))
        expected += [start + at for at in own]
    assert picked.dtype == torch.int32
    assert picked.tolist() == expected


def test_fps_picks_the_first_of_points_that_are_equally_far() -> None:
    points = torch.tensor([[0.0], [1.0], [-1.0], [1.0]])

    picked = poptorch.fps(points, [0, 4], 0.75)

    assert picked.tolist() == [0, 1, 2]


@pytest.fixture(scope="module")
def random_starts() -> tuple[torch.Tensor, list[list[int]]]:
    """Return two segments of 20 points, and what eight calls pick that may start anywhere."""
    src = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    anywhere = Calling(lambda x: poptorch.fps(x, [0, 20, 40], 0.2, random_start=True))
    model = poptorch.inferenceModel(anywhere, options().randomSeed(1))
    return src, [model(src).tolist() for _ in range(8)]


Starts = tuple[torch.Tensor, list[list[int]]]


@pytest.mark.parametrize("segment", [0, 1])
def test_fps_picks_the_farthest_points_from_a_random_start(
    random_starts: Starts, segment: int
) -> None:
    src, calls = random_starts
    points = src[20 * segment : 20 * segment + 20]
    for picked in calls:
        own = [at - 20 * segment for at in picked[4 * segment : 4 * segment + 4]]

        assert own == farthest(points, 4, first=own[0])


def test_fps_starts_at_a_different_point_in_each_call_and_segment(random_starts: Starts) -> None:
    _, calls = random_starts

    starts = {(0, picked[0]) for picked in calls} | {(1, picked[4]) for picked in calls}

    assert len(starts) > 4


def nearest_by_definition(
    x: torch.Tensor, y: torch.Tensor, batch_x: list[int], batch_y: list[int]
) -> list[int]:
    """Return for each row of x the nearest row of y with the same batch number."""
    gaps = (x[:, None] - y).norm(dim=-1)
    gaps[torch.tensor(batch_x)[:, None] != torch.tensor(batch_y)] = math.inf
    return gaps.argmin(1).tolist()


BATCH_X, BATCH_Y = [0, 0, 0, 1, 1, 2, 2], [0, 0, 1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize(
    "batch_x, batch_y",
    [
        pytest.param(BATCH_X, BATCH_Y, id="lists"),
        pytest.param(torch.tensor(BATCH_X), torch.tensor(BATCH_Y), id="tensors"),
        pytest.param(torch.tensor(BATCH_X), BATCH_Y, id="mixed"),
    ],
)
def test_nearest_looks_within_the_batch(batch_x: Any, batch_y: Any) -> None:
    x, y = torch.randn(7, 3), torch.randn(9, 3)

    found = agrees(lambda a, b: poptorch.nearest(a, b, batch_x, batch_y), x, y, check_dtype=False)

    assert found.dtype == torch.int32
    assert found.tolist() == nearest_by_definition(x, y, BATCH_X, BATCH_Y)


def test_nearest_takes_points_on_a_line() -> None:
    x, y = torch.randn(7), torch.randn(9)

    found = agrees(lambda a, b: poptorch.nearest(a, b, BATCH_X, BATCH_Y), x, y, check_dtype=False)

    assert found.tolist() == nearest_by_definition(x[:, None], y[:, None], BATCH_X, BATCH_Y)


def test_nearest_looks_everywhere_without_batch_numbers() -> None:
    x, y = torch.randn(7, 3), torch.randn(9, 3)

    found = agrees(lambda a, b: poptorch.nearest(a, b, None, None), x, y, check_dtype=False)

    assert found.tolist() == nearest_by_definition(x, y, [0] * 7, [0] * 9)


def test_nearest_takes_batch_numbers_of_one_side_and_half_precision() -> None:
    x = torch.randn(7, 3).half()

    found = poptorch.nearest(x, x, None, [0] * 7)

    assert found.tolist() == [*range(7)]


def test_gradients_flow_through_points_that_were_picked() -> None:
    model = Scaled(lambda x: x[poptorch.fps(x, [0, 4], 0.5)])

    trains_alike(model, torch.arange(4.0).square()[:, None], lr=0.001)
