"""What collectives cost over a link, and the curve of a model over numbers of processes."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import poptorch
from helpers.pricing import Stack, meta, wrapped
from poptorch._ipu_model import scaling
from poptorch._ipu_model.scaling import Link, Remedy, gather, hierarchical, link_of, ring, tree

WIRE = Link(0.0, 1e9, copying=0.0, waking=0.0)
FAR = replace(WIRE, latency=1e-3, bandwidth=math.inf)
POWERS, SQUARES = [1 << n for n in range(1, 11)], [16, 64, 256, 1024]


@pytest.mark.parametrize("link", [WIRE, FAR, Link(1e-5, 1e9)])
def test_no_way_is_faster_with_more_bytes_or_processes(link: Link) -> None:
    for cost, counts in ((ring, POWERS), (tree, POWERS), (hierarchical, SQUARES)):
        assert cost(1e6, 1, link) == cost(0, 8, link) == 0
        times = torch.tensor([[cost(size, n, link) for n in counts] for size in (1e4, 2e6, 3e8)])
        assert (times.diff(dim=0) >= 0).all()
        assert (times.diff(dim=1) >= 0).all()


@pytest.mark.parametrize("n", [2, 4, 64, 1024])
def test_each_way_takes_the_steps_and_the_bytes_of_its_source(n: int) -> None:
    size, levels, root = 3e8, math.log2(n), math.isqrt(n)
    moved = 2 * (n - 1) / n * size / 1e9  # Patarasuk and Yuan: no sum over processes moves less
    assert ring(size, n, WIRE) == pytest.approx(moved)
    assert ring(size, n, WIRE, 2) == pytest.approx(2 * moved)  # two at once share the link
    assert ring(size, 1 << 20, WIRE) == pytest.approx(2 * size / 1e9, rel=1e-5)
    assert ring(1, n, FAR) == pytest.approx(2 * (n - 1) * 2e-3)
    assert tree(size, n, WIRE) == pytest.approx(min(moved, levels * size / 1e9))
    assert tree(1, n, FAR) == pytest.approx(levels * 2e-3)
    assert gather(1, n, FAR) == pytest.approx(n / 2 * (2 + levels) * 1e-3)
    if root > 1:
        assert hierarchical(size, n, WIRE) == pytest.approx(moved)
        assert hierarchical(1, n, FAR) == pytest.approx(2 * 2 * (root - 1) * 2e-3)


def curve(*counts, wide=128, sharded=False, **how):
    """The curve of four square layers, and the estimate."""
    options = how.setdefault("options", poptorch.Options())
    where = poptorch.TensorLocationSettings().useReplicatedTensorSharding(sharded)
    options.TensorLocations.setOptimizerLocation(where)
    executor = wrapped(lambda: Stack(4, wide), optimizer="AdamW", steps=2, **how)
    batch, link = meta(16 * options.device_iterations, wide), {"latency": "1ms", "bandwidth": "1GB"}
    priced = poptorch.estimate(executor, batch, processes=counts, **link)
    return priced.scaling, priced


def test_a_curve_is_of_the_plan_s_own_gradients() -> None:
    (made, priced), link = curve(1, 2, 64), Link(1e-3, 1e9)
    start = made.bytes, made.computing, made.source
    assert start == (4 * 128 * 128 * 4, priced.seconds, "estimated for mk2:64")
    assert [row.processes for row in made.rows] == [1, 2, 64]
    assert (made.rows[0].exchanging, made.rows[0].efficiency) == (0, 1)
    for row in made.rows[1:]:
        assert row.exchanging == pytest.approx(ring(made.bytes, row.processes, link))
        own = made.computing / (made.computing + row.exchanging)
        assert (row.efficiency, row.bound) == (own, "latency")
    (large,) = curve(2, wide=1024)[0].rows  # some of these gradients are there early
    assert large.exchanging < ring(8 << 20, 2, link, 2)
    (thrice,) = curve(64, options=poptorch.Options().deviceIterations(3))[0].rows
    assert thrice.exchanging == pytest.approx(3 * row.exchanging)
    (divided,) = curve(64, sharded=True)[0].rows  # which passes the weights on, too
    assert divided.exchanging == pytest.approx(row.exchanging + gather(made.bytes, 64, link))
    assert divided.remedies[0] == Remedy("undivided optimizer state", row.efficiency)
    # Those that leave early travel beside the computation.
    early = scaling.Exchanged((2e6,), ((1e6,),), left=0.5)
    waits = [early.seconds(computing, 8, WIRE) for computing in (0.0, 1e-3, 1.0)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] == pytest.approx(ring(1.5e6, 8, WIRE, 2))
    assert waits[2] == pytest.approx(ring(1e6, 8, WIRE))


def test_links_are_read_with_units_or_found_from_sums_and_what_cannot_be_is_refused() -> None:
    assert link_of("2s", "100Gb") == link_of(2, "12.5 GB/s") == Link(2.0, 12.5e9)
    assert link_of("1.5ms", "200Mbit/s") == Link(1.5e-3, 2.5e7)
    for link, n in itertools.product((Link(2e-5, 1e9), Link(1e-3, 2.5e7), Link(0.02, 1e9)), POWERS):
        found = scaling.fitted(n, ring(4, n, link), n * 4e6, ring(n * 4e6, n, link))
        assert 0.7 < found.latency / link.latency < 1.42  # the next power of two
        assert 0.7 < found.bandwidth / link.bandwidth < 1.42
    for latency, bandwidth, name in (
        ("20", 1, "latency"), ("1Gb", 1, "latency"), (None, 1, "latency"), (-1, 1, "latency"),
        (0, 0, "bandwidth"), (0, "2us", "bandwidth"), (0, True, "bandwidth"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"needs the {name} of the link"):
            link_of(latency, bandwidth)
    with pytest.raises(ValueError, match="Processes are counted by whole numbers"):
        curve(0)
    options = poptorch.Options()
    options.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="A curve over processes starts from one"):
        curve(8, options=options)
