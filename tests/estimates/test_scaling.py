"""Other ways to add up over processes, and curves of throughput over their number."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import poptorch
from helpers.pricing import Stack, meta, wrapped
from poptorch import Estimate
from poptorch._cost.links import Link, gather, ring
from poptorch._ipu_model.scaling import Remedy, hierarchical, link_of, tree

WIRE = Link(0.0, 1e9, copying=0.0, waking=0.0)
"""A link of 1 GB/s without latency."""
FAR = replace(WIRE, latency=1e-3, bandwidth=math.inf)
"""A link of 1 ms whose bandwidth has no limit."""
POWERS = [1 << n for n in range(1, 11)]
SQUARES = [16, 64, 256, 1024]

# Ways to add up over processes.

WAYS = [(tree, POWERS), (hierarchical, SQUARES)]
each_way = pytest.mark.parametrize("cost, counts", WAYS, ids=["tree", "hierarchical"])
each_link = pytest.mark.parametrize("link", [WIRE, FAR, Link(1e-5, 1e9)])
Cost = Callable[..., float]


@each_link
@each_way
def test_one_process_and_no_bytes_cost_nothing(cost: Cost, counts: list[int], link: Link) -> None:
    assert cost(1e6, 1, link) == 0
    assert cost(0, 8, link) == 0


@each_link
@each_way
def test_no_algorithm_is_faster_with_more_bytes_or_processes(
    cost: Cost, counts: list[int], link: Link
) -> None:
    times = torch.tensor([[cost(size, n, link) for n in counts] for size in (1e4, 2e6, 3e8)])

    assert times.diff(dim=0).min() >= 0
    assert times.diff(dim=1).min() >= 0


SIZE = 3e8
"""Bytes to be added up."""
each_count = pytest.mark.parametrize("n", [2, 4, 64, 1024])
each_square = pytest.mark.parametrize("n", [4, 64, 1024])


def seconds_moving(n: int) -> float:
    """Patarasuk and Yuan: no sum over processes moves less."""
    return 2 * (n - 1) / n * SIZE / 1e9


@each_count
def test_a_tree_moves_everything_at_every_level_or_as_little_as_a_ring(n: int) -> None:
    levels = math.log2(n)

    assert tree(SIZE, n, WIRE) == pytest.approx(min(seconds_moving(n), levels * SIZE / 1e9))


@each_count
def test_a_tree_takes_one_step_for_each_level(n: int) -> None:
    assert tree(1, n, FAR) == pytest.approx(math.log2(n) * 2e-3)


@each_square
def test_rings_in_rings_move_the_fewest_bytes(n: int) -> None:
    assert hierarchical(SIZE, n, WIRE) == pytest.approx(seconds_moving(n))


@each_square
def test_rings_in_rings_take_the_steps_of_two_small_rings(n: int) -> None:
    side = math.isqrt(n)

    assert hierarchical(1, n, FAR) == pytest.approx(2 * 2 * (side - 1) * 2e-3)


# Curves.


def estimated(
    *counts: int,
    wide: int = 128,
    sharded: bool = False,
    options: poptorch.Options | None = None,
) -> Estimate:
    """The estimate of training four square layers, with a curve over numbers of processes.

    Args:
        counts: numbers of processes.
        wide: the width of the layers.
        sharded: whether the state of the optimizer is divided over processes.
        options: of the wrapper.
    """
    options = options or poptorch.Options()
    where = poptorch.TensorLocationSettings().useReplicatedTensorSharding(sharded)
    options.TensorLocations.setOptimizerLocation(where)
    executor = wrapped(lambda: Stack(4, wide), optimizer="AdamW", steps=2, options=options)
    batch = meta(16 * options.device_iterations, wide)
    return poptorch.estimate(executor, batch, processes=counts, latency="1ms", bandwidth="1GB")


LINK = Link(1e-3, 1e9)


@pytest.fixture(scope="module")
def small_layers() -> Estimate:
    """Estimate small layers with 1, 2 and 64 processes."""
    return estimated(1, 2, 64)


@pytest.fixture(scope="module")
def curve(small_layers: Estimate) -> Any:
    return small_layers.scaling


@pytest.fixture(scope="module")
def row_of_64(curve: Any) -> Any:
    return curve.rows[2]


def test_a_curve_starts_from_the_gradients_and_the_time_of_the_estimate(
    curve: Any, small_layers: Estimate
) -> None:
    assert curve.bytes == 4 * 128 * 128 * 4
    assert curve.computing == small_layers.seconds
    assert curve.source == "estimated for mk2:64"


def test_a_curve_has_a_row_for_each_number_of_processes(curve: Any) -> None:
    assert [row.processes for row in curve.rows] == [1, 2, 64]


def test_one_process_exchanges_nothing(curve: Any) -> None:
    alone = curve.rows[0]

    assert alone.exchanging == 0
    assert alone.efficiency == 1


@pytest.mark.parametrize("at", [1, 2], ids=["2 processes", "64 processes"])
def test_several_processes_exchange_gradients_around_a_ring(curve: Any, at: int) -> None:
    row = curve.rows[at]

    assert row.exchanging == pytest.approx(ring(curve.bytes, row.processes, LINK))
    assert row.efficiency == curve.computing / (curve.computing + row.exchanging)
    assert row.bound == "latency"


def test_gradients_of_large_layers_that_are_there_early_are_sent_early() -> None:
    (row,) = estimated(2, wide=1024).scaling.rows

    assert row.exchanging < ring(8 << 20, 2, LINK, 2)


def test_every_iteration_exchanges_its_gradients(row_of_64: Any) -> None:
    options = poptorch.Options().deviceIterations(3)

    (row,) = estimated(64, options=options).scaling.rows

    assert row.exchanging == pytest.approx(3 * row_of_64.exchanging)


@pytest.fixture(scope="module")
def divided() -> Any:
    """The row of 64 processes with a divided state."""
    (row,) = estimated(64, sharded=True).scaling.rows
    return row


def test_processes_with_a_divided_state_pass_the_weights_on_too(
    divided: Any, row_of_64: Any, curve: Any
) -> None:
    weights = gather(curve.bytes, 64, LINK)

    assert divided.exchanging == pytest.approx(row_of_64.exchanging + weights)


def test_an_undivided_state_is_advised_with_its_efficiency(divided: Any, row_of_64: Any) -> None:
    assert divided.remedies[0] == Remedy("undivided optimizer state", row_of_64.efficiency)


def test_an_estimate_for_zero_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="Numbers of processes must be integers"):
        estimated(0)


def test_a_curve_of_one_process_of_several_is_refused() -> None:
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)

    with pytest.raises(
        poptorch.Error,
        match="An estimate for several processes must be computed in a single process",
    ):
        estimated(8, options=options)


# Links.


@pytest.mark.parametrize(
    "latency, bandwidth, link",
    [
        ("2s", "100Gb", Link(2.0, 12.5e9)),
        (2, "12.5 GB/s", Link(2.0, 12.5e9)),
        ("1.5ms", "200Mbit/s", Link(1.5e-3, 2.5e7)),
    ],
)
def test_links_are_read_with_units(latency: Any, bandwidth: Any, link: Link) -> None:
    assert link_of(latency, bandwidth) == link


@pytest.mark.parametrize(
    "latency, bandwidth, name",
    [
        ("20", 1, "latency"),
        ("1Gb", 1, "latency"),
        (None, 1, "latency"),
        (-1, 1, "latency"),
        (0, 0, "bandwidth"),
        (0, "2us", "bandwidth"),
        (0, True, "bandwidth"),
    ],
)
def test_a_wrong_number_of_a_link_is_refused(latency: Any, bandwidth: Any, name: str) -> None:
    with pytest.raises(ValueError, match=f"needs the {name} of the link"):
        link_of(latency, bandwidth)
