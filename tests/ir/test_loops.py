"""The order of a batch: cutting, numbering and putting together agree, whatever the counts."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from poptorch._ir.loops import Lanes, Loops
from poptorch.enums import CommGroupType


@st.composite
def counts(draw):
    replicas = draw(st.integers(1, 6))
    group = draw(st.sampled_from([g for g in range(1, replicas + 1) if replicas % g == 0]))
    kind = draw(st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]))
    return Loops(draw(st.integers(1, 3)), draw(st.integers(1, 4)), replicas, group, kind)


def test_the_combined_batch_is_a_product():
    loops = Loops(iterations=2, accumulation=5, replicas=3)
    assert (loops.steps, loops.slices, loops.micro_batches) == (10, 30, 30)
    assert str(loops) == "2 device iterations x 3 replicas x 5 accumulation steps"
    grouped = Loops(2, 5, 6, input_group_size=2)
    assert (grouped.slices, grouped.micro_batches) == (30, 60)
    assert str(grouped) == "2 device iterations x 3 input groups x 5 accumulation steps"
    value = torch.tensor(3)
    assert Loops().cut([value]) == [(value,)]


@settings(max_examples=60, deadline=None)
@given(counts(), st.integers(1, 3))
def test_slices_lie_in_the_order_of_the_batch(loops: Loops, rows: int):
    value = torch.arange(loops.slices * rows * 2).view(-1, 2)
    whole = value.view(loops.iterations, loops.accumulation, loops.input_groups, rows, 2)
    (slices,) = loops.cut([value])
    numbers = []
    for iteration in range(loops.iterations):
        for accumulated in range(loops.accumulation):
            step = loops.step(iteration, accumulated)
            assert loops.iteration(step) == iteration
            for replica in range(loops.replicas):
                wanted = whole[iteration, accumulated, loops.input_group(replica)]
                assert torch.equal(slices[loops.slice_of(step, replica)], wanted)
                numbers.append(loops.micro_batch(step, replica))
    assert numbers == [*range(loops.micro_batches)]


@settings(max_examples=60, deadline=None)
@given(counts(), st.data())
def test_lanes_read_what_single_runs_would(loops: Loops, data):
    steps = data.draw(
        st.sampled_from([n for n in range(1, loops.steps + 1) if loops.steps % n == 0])
    )
    lanes = Lanes(steps, loops.replicas)
    value = torch.arange(loops.slices * 2).view(-1, 1)
    (singly,) = loops.cut([value])
    (runs,) = loops.cut([value], lanes)
    assert len(runs) * lanes.count == loops.micro_batches
    for step in range(loops.steps):
        for replica in range(loops.replicas):
            lane = (step % steps) * loops.replicas + replica
            assert torch.equal(runs[step // steps][lane], singly[loops.slice_of(step, replica)])
