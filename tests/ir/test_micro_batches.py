"""Loops: how the combined batch is cut into slices, and which slices lanes read."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poptorch._ir.micro_batches import Lanes, Loops
from poptorch.enums import CommGroupType


def test_the_combined_batch_is_a_product() -> None:
    loops = Loops(iterations=2, accumulation=5, replicas=3)

    assert loops.steps == 2 * 5
    assert loops.slices == 2 * 5 * 3
    assert loops.micro_batches == 2 * 5 * 3
    assert str(loops) == "2 device iterations x 3 replicas x 5 accumulation steps"


def test_replicas_of_a_group_share_a_slice() -> None:
    grouped = Loops(iterations=2, accumulation=5, replicas=6, input_group_size=2)

    assert grouped.slices == 2 * 5 * 3
    assert grouped.micro_batches == 2 * 5 * 6
    assert str(grouped) == "2 device iterations x 3 input groups x 5 accumulation steps"


def test_one_micro_batch_is_the_value_itself() -> None:
    value = torch.tensor(3)

    assert Loops().cut([value]) == [(value,)]


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


@st.composite
def counts(draw: st.DrawFn) -> Loops:
    """Loops of up to 3 iterations, 4 accumulation steps and 6 replicas, with groups."""
    replicas = draw(st.integers(1, 6))
    return Loops(
        iterations=draw(st.integers(1, 3)),
        accumulation=draw(st.integers(1, 4)),
        replicas=replicas,
        input_group_size=draw(st.sampled_from(divisors(replicas))),
        input_group_type=draw(
            st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal])
        ),
    )


@settings(max_examples=60, deadline=None)
@given(counts(), st.integers(1, 3))
def test_slices_are_in_the_order_of_the_batch(loops: Loops, rows: int) -> None:
    """Iterations are outermost, then accumulation steps, then input groups."""
    value = torch.arange(loops.slices * rows * 2).view(-1, 2)
    whole = value.view(loops.iterations, loops.accumulation, loops.input_groups, rows, 2)

    (slices,) = loops.cut([value])

    for iteration in range(loops.iterations):
        for accumulated in range(loops.accumulation):
            step = loops.step(iteration, accumulated)
            assert loops.iteration(step) == iteration
            for replica in range(loops.replicas):
                expected = whole[iteration, accumulated, loops.input_group(replica)]
                assert torch.equal(slices[loops.slice_of(step, replica)], expected)


@settings(max_examples=60, deadline=None)
@given(counts())
def test_micro_batches_are_numbered_step_by_step_and_replica_by_replica(loops: Loops) -> None:
    numbers = [
        loops.micro_batch(step, replica)
        for step in range(loops.steps)
        for replica in range(loops.replicas)
    ]

    assert numbers == [*range(loops.micro_batches)]


@settings(max_examples=60, deadline=None)
@given(counts(), st.data())
def test_lanes_read_the_same_slices_as_single_runs(loops: Loops, data: st.DataObject) -> None:
    steps = data.draw(st.sampled_from(divisors(loops.steps)))
    lanes = Lanes(steps, loops.replicas)
    value = torch.arange(loops.slices * 2).view(-1, 1)
    (singly,) = loops.cut([value])

    (runs,) = loops.cut([value], lanes)

    assert len(runs) * lanes.count == loops.micro_batches
    for step in range(loops.steps):
        for replica in range(loops.replicas):
            lane = (step % steps) * loops.replicas + replica
            expected = singly[loops.slice_of(step, replica)]
            assert torch.equal(runs[step // steps][lane], expected)
