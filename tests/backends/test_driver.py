"""Cutting a combined batch and putting results together, for random counts and modes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import poptorch
from poptorch import CommGroupType, OutputMode

pytestmark = pytest.mark.slow


class Scale(torch.nn.Module):
    """Returns rows and a scalar per micro-batch."""

    def forward(self, x):
        return x * 2, x.sum()


class Count(torch.nn.Module):
    """Counts micro-batches in a buffer, which keeps them from running side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return x * 2, x.sum(), self.count.clone()


@st.composite
def cases(draw):
    iterations = draw(st.integers(1, 4))
    replicas = draw(st.integers(1, 4))
    group = draw(st.sampled_from([g for g in range(1, replicas + 1) if replicas % g == 0]))
    kind = draw(st.sampled_from([CommGroupType.Consecutive, CommGroupType.Orthogonal]))
    mode = draw(st.sampled_from([m for m in OutputMode if m is not OutputMode.Default]))
    period = draw(st.sampled_from([n for n in range(1, iterations + 1) if iterations % n == 0]))
    rows = draw(st.integers(1, 3))
    return iterations, replicas, group, kind, mode, period, rows, draw(st.integers(0, 9))


@settings(max_examples=60, deadline=None)
@given(cases())
def test_inference_in_every_mode(case) -> None:
    iterations, replicas, group, kind, mode, period, rows, lanes = case
    opts = poptorch.Options().backend("reference").showCompilationProgressBar(False)
    opts.autoRoundNumIPUs(True)
    opts.deviceIterations(iterations).replicationFactor(replicas).broadcastBuffers(False)
    opts.inputReplicaGrouping(group, kind).lanes(lanes)
    opts.outputMode(mode, period) if mode is OutputMode.EveryN else opts.outputMode(mode)
    groups = replicas // group
    x = torch.arange(iterations * groups * rows * 2.0).reshape(-1, 2)
    out, total, count = poptorch.inferenceModel(Count(), opts)(x)
    beside = poptorch.inferenceModel(Scale(), opts)(x)

    pieces = x.reshape(iterations, groups, rows, 2)
    group_of = [
        r // group if kind is CommGroupType.Consecutive else r % groups for r in range(replicas)
    ]
    per_replica = pieces[:, group_of]  # iterations, replicas, rows, 2
    counts = torch.arange(1.0, iterations + 1)[:, None].expand(iterations, replicas)
    if mode is OutputMode.Final:
        kept = slice(iterations - 1, iterations)
    elif mode is OutputMode.EveryN:
        kept = slice(period - 1, iterations, period)
    else:
        kept = slice(0, iterations)
    rows_out, totals, counts = per_replica[kept] * 2, per_replica[kept].sum((2, 3)), counts[kept]
    if mode is OutputMode.Sum:
        rows_out, totals, counts = rows_out.sum(0), totals.sum(0), counts.sum(0)
    expected = [rows_out.reshape(-1, 2), totals.reshape(-1), counts.reshape(-1)]
    if totals.numel() == 1:
        expected = [expected[0], totals.reshape(()), counts.reshape(())]
    ours_then_theirs = zip((out, total, count, *beside), (*expected, *expected[:2]), strict=True)
    for ours, theirs in ours_then_theirs:
        assert ours.shape == theirs.shape
        assert torch.equal(ours, theirs)
