"""Kernels run after the writes that they read, however they were fused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F

from helpers.inductor_graphs import Tensors, check, graph
from poptorch.backends.inductor import compiler, writes

pytestmark = pytest.mark.slow


def step(
    w: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, x: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """Dropout after a normalisation: its mask is written into a tensor, and read in fused loops."""
    leaves = [value.detach().requires_grad_() for value in (w, scale, shift)]
    normal = F.batch_norm(x @ leaves[0], None, None, *leaves[1:], training=True)
    loss = (F.dropout(F.relu(normal), 0.3) @ leaves[0]).square().mean()
    gradients = torch.autograd.grad(loss, leaves)
    return [loss.detach()], [w - 0.1 * g for w, g in zip(leaves, gradients, strict=True)]


def examples() -> Tensors:
    return [torch.randn(4, 4), torch.ones(4), torch.zeros(4), torch.randn(8, 4)]


def forgotten(nodes: list[Any]) -> list[tuple[str, str]]:
    """Return what nodes read by the name that it had before it was written into."""
    parts = [part for node in nodes for part in node.get_nodes()]
    return [
        (part.get_name(), read.name)
        for part in parts
        for read in part.read_writes.reads
        if read.name in part.mutation_renames
    ]


@pytest.mark.parametrize("kept", [True, False])
def test_reads_are_known_after_fusing(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """``kept=False``: torch's own way does forget, so this test can fail."""
    found, renamed = [], []

    def look(nodes: list[Any]) -> list[Any]:
        found.extend(forgotten(nodes))
        renamed.extend(part.mutation_renames for node in nodes for part in node.get_nodes())
        return nodes

    if not kept:
        monkeypatch.setattr(compiler, "keep_dependencies", lambda nodes: nodes)
    with torch._inductor.config.patch(_post_fusion_custom_pass=look, fx_graph_cache=False):
        compiler.compile_graph(graph(step, examples()), examples())
    assert any(renamed)
    assert bool(found) is not kept


def test_it_computes_the_same() -> None:
    check(step, examples())


def test_torchs_class_is_left_alone() -> None:
    from torch._inductor.scheduler import SchedulerNode

    before = dict(vars(SchedulerNode))

    class Node:
        def get_nodes(self) -> list[Any]:
            return [self]

        def recompute_size_and_body(self) -> None:
            raise NotImplementedError

    (node,) = writes.keep_dependencies([Node()])
    assert node.recompute_size_and_body.func is writes._recompute
    assert vars(SchedulerNode) == before
