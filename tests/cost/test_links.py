"""What sums and exchanges over a link between processes take."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from poptorch._cost.links import Link, UpdateExchange, fitted, gather, ring

WIRE = Link(0.0, 1e9, copying=0.0, waking=0.0)
"""A link of 1 GB/s without latency."""
FAR = replace(WIRE, latency=1e-3, bandwidth=math.inf)
"""A link of 1 ms whose bandwidth has no limit."""
POWERS = [1 << n for n in range(1, 11)]
each_link = pytest.mark.parametrize("link", [WIRE, FAR, Link(1e-5, 1e9)])
SIZE = 3e8
"""Bytes to be added up."""
each_count = pytest.mark.parametrize("n", [2, 4, 64, 1024])


@each_link
def test_a_ring_of_one_process_or_of_no_bytes_costs_nothing(link: Link) -> None:
    assert ring(1e6, 1, link) == 0
    assert ring(0, 8, link) == 0


@each_link
def test_no_ring_is_faster_with_more_bytes_or_processes(link: Link) -> None:
    times = torch.tensor([[ring(size, n, link) for n in POWERS] for size in (1e4, 2e6, 3e8)])

    assert times.diff(dim=0).min() >= 0
    assert times.diff(dim=1).min() >= 0


def seconds_moving(n: int) -> float:
    """Patarasuk and Yuan: no sum over processes moves less."""
    return 2 * (n - 1) / n * SIZE / 1e9


@each_count
def test_a_ring_moves_the_fewest_bytes(n: int) -> None:
    assert ring(SIZE, n, WIRE) == pytest.approx(seconds_moving(n))


@each_count
def test_two_rings_at_once_share_the_link(n: int) -> None:
    assert ring(SIZE, n, WIRE, 2) == pytest.approx(2 * seconds_moving(n))


def test_a_ring_of_very_many_moves_everything_twice() -> None:
    assert ring(SIZE, 1 << 20, WIRE) == pytest.approx(2 * SIZE / 1e9, rel=1e-5)


@each_count
def test_a_ring_takes_two_steps_for_each_other_process(n: int) -> None:
    assert ring(1, n, FAR) == pytest.approx(2 * (n - 1) * 2e-3)


@each_count
def test_gathering_takes_the_steps_of_its_source(n: int) -> None:
    assert gather(1, n, FAR) == pytest.approx(n / 2 * (2 + math.log2(n)) * 1e-3)


@pytest.fixture
def half_of_it_early() -> UpdateExchange:
    """2 MB of gradients. 1 MB can be sent when half of the computation remains."""
    return UpdateExchange((2e6,), ((1e6,),), left=0.5)


def test_early_gradients_wait_less_if_more_computation_remains(
    half_of_it_early: UpdateExchange,
) -> None:
    waits = [half_of_it_early.seconds(computing, 8, WIRE) for computing in (0.0, 1e-3, 1.0)]

    assert waits == sorted(waits, reverse=True)


def test_early_gradients_share_the_link_if_nothing_is_left_to_compute(
    half_of_it_early: UpdateExchange,
) -> None:
    assert half_of_it_early.seconds(0.0, 8, WIRE) == pytest.approx(ring(1.5e6, 8, WIRE, 2))


def test_early_gradients_cost_nothing_if_there_is_enough_left_to_compute(
    half_of_it_early: UpdateExchange,
) -> None:
    assert half_of_it_early.seconds(1.0, 8, WIRE) == pytest.approx(ring(1e6, 8, WIRE))


@pytest.mark.parametrize(
    "link, n",
    list(itertools.product([Link(2e-5, 1e9), Link(1e-3, 2.5e7), Link(0.02, 1e9)], POWERS)),
)
def test_a_link_is_found_from_two_sums_to_the_next_power_of_two(link: Link, n: int) -> None:
    few, many = 4, n * 4e6

    found = fitted(n, ring(few, n, link), many, ring(many, n, link))

    assert 0.7 < found.latency / link.latency < 1.42
    assert 0.7 < found.bandwidth / link.bandwidth < 1.42
