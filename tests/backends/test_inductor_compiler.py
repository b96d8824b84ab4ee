"""The compiled graph does what the traced one does, and writes state early, after it was read."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from helpers.cases import few
from helpers.inductor_graphs import Step, Tensors, check, graph
from poptorch.backends.inductor.lowering import fakes, lower
from poptorch.backends.inductor.writes import place_writes

pytestmark = pytest.mark.slow
aten = torch.ops.aten


def dropping(w: torch.Tensor, momentum: torch.Tensor, x: torch.Tensor) -> tuple[Tensors, Tensors]:
    """A training step with state and random numbers; a result has other strides."""
    leaf = w.detach().requires_grad_()
    out = F.dropout(x @ leaf, 0.5)
    (grad,) = torch.autograd.grad(F.cross_entropy(out, torch.zeros_like(out[:, 0]).long()), leaf)
    new = momentum * 0.9 + grad
    return [out.detach(), out.detach().t()], [w - 0.1 * new, new]


def norm(w, scale, shift, x) -> tuple[Tensors, Tensors]:
    """A dropout's mask is written and read in loops; torch 2.13's ``addmm`` drops ``alpha``."""
    leaves = [value.detach().requires_grad_() for value in (w, scale, shift)]
    normal = F.batch_norm(x @ leaves[0], None, None, *leaves[1:], training=True)
    loss = (F.dropout(F.relu(normal), 0.3) @ leaves[0]).square().mean()
    gradients = torch.autograd.grad(loss, leaves)
    added = torch.add(x, torch.mm(x * 2, w), alpha=0.5)  # a product with one user
    return [loss.detach(), added], [w - 0.1 * g for w, g in zip(leaves, gradients, strict=True)]


def reading(w: torch.Tensor, x: torch.Tensor, through_view: bool = True) -> tuple[Tensors, Tensors]:
    """The new value is there at once; the old one is read by the last product."""
    old = w.t() if through_view else w
    hidden = x @ x
    for _ in range(3):
        hidden = hidden @ x
    return [hidden @ old], [w * 2.0 + 1.0]


STEPS: dict[str, tuple[Step, list[tuple[int, ...]]]] = {
    "dropping": (dropping, [(6, 3), (6, 3), (4, 6)]), "norm": (norm, [(4, 4), (4,), (4,), (8, 4)]),
    "reading": (reading, [(4, 4), (4, 4)]),
}  # fmt: skip


def examples(name: str) -> Tensors:
    return [torch.randn(shape) * 0.3 for shape in STEPS[name][1]]


@pytest.mark.parametrize("name", few(STEPS, "norm"))
def test_steps(name: str) -> None:
    check(STEPS[name][0], examples(name))


# State is updated as early as possible, and never before its old value was read.


def placed(step: Step, tensors: Tensors) -> list[fx.Node]:
    found = lower(*graph(step, tensors), fakes(tensors)[1], {}, {}).graph
    place_writes(found)
    before = [node.target for node in found.nodes]
    place_writes(found)
    assert [node.target for node in found.nodes] == before
    return list(found.nodes)


@pytest.mark.parametrize("through_view", [False, True])
def test_old_values_are_read_before(through_view: bool) -> None:
    nodes = placed(lambda w, x: reading(w, x, through_view), examples("reading"))
    targets = [node.target for node in nodes]
    last = max(i for i, target in enumerate(targets) if target is aten.mm.default)
    assert targets.index(aten.copy_.default) > last


def test_a_weight_is_updated_before_the_gradient_of_the_next_if_there_are_any() -> None:
    nodes = placed(lambda w, v, x: ([], [w - x @ w, v - x @ v]), [*torch.randn(3, 3, 3)])
    heavy = [node.target for node in nodes if node.target in (aten.mm.default, aten.copy_.default)]
    assert heavy == [aten.mm.default, aten.copy_.default] * 2
    for step in (lambda a: ([a + 1], [a * 2]), lambda a: ([a @ a], []), lambda a: ([], [a + 1])):
        assert placed(step, [torch.randn(3, 3)])
