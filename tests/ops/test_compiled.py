"""Operators of ours in compiled code: what the interpreter makes of them, in its order."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import custom_functions
from helpers.wrapping import Calling, Scaled, Several, options, runs_compiled, training
from ops import test_collectives, test_control, test_known
from ops.test_debug import show, titles

pytestmark = pytest.mark.slow

X = torch.tensor([[0.5, -1.5], [2.0, 1.0], [-0.5, 3.0], [1.5, 0.75]])
MATRICES = torch.linspace(-1, 1, 24).view(3, 2, 4)
GROUPS = torch.cat([MATRICES, MATRICES.flip(0)], 1)
ENDS = torch.tensor([1, 3, 4], dtype=torch.int32)
ROWS = torch.tensor([1, 0, 0, 1])
CLASSES = torch.tensor([[1, 2], [3, 1]])


def alignment(a):
    """The batch comes first, so that scores do not lie as their dimensions say."""
    scores = F.pad(a, (1, 1)).view(1, 4, 4).expand(2, 4, 4).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, CLASSES, (4, 3), (2, 1))


PRODUCT = poptorch.MatMulSerializationMode.OutputChannels
ALONE = {
    **{name: (known, x) for name, (known, _, x) in test_known.CASES.items()},
    "product": (lambda a: poptorch.serializedMatMul(a, MATRICES[0], PRODUCT, 4), X),
    "products of groups": (lambda a: F.grouped_mm(F.pad(a, (0, 2)), GROUPS, offs=ENDS), X),
    "alignment": (alignment, X),
    "sums of rows": (lambda a: torch.zeros(2, 2).index_add(0, ROWS, a), X),
}
CUSTOM = {name: (custom_functions.FUNCTIONS[name][0], X[:1]) for name in ("Two", "Turned")}
TOGETHER = {name: (known, X) for name, (known, _) in test_collectives.CASES.items()}


@pytest.mark.parametrize(
    "table, lanes, replicas",
    [(ALONE, 2, 1), (CUSTOM, 1, 1), (TOGETHER, 1, test_collectives.REPLICAS)],
)
def test_operators_train_as_interpreted(table, lanes: int, replicas: int) -> None:
    functions, inputs = zip(*table.values(), strict=True)
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    batch = [torch.cat([x + at for at in range(lanes * replicas)]) for x in inputs]
    found = []
    for backend in ("reference", "inductor"):
        model = Several([lambda a, f=f: f(a).sin() for f in functions], weights)
        executor = training(model, options(backend, accumulation=lanes, replicas=replicas))
        outs, _ = executor(*batch)
        assert runs_compiled(executor) == (backend == "inductor")
        found.append((outs, [weight.detach() for weight in model.weights]))
    for at, name in enumerate(table):
        (ours, after), (theirs, wanted) = ((outs[at], moved[at]) for outs, moved in found)
        torch.testing.assert_close(ours, theirs, msg=name)
        torch.testing.assert_close(after, wanted, msg=name)
        assert not torch.equal(after, weights[at]), name


class Control(nn.Module):
    """Nested loops and nested conditions."""

    def __init__(self) -> None:
        super().__init__()
        self.looped, self.conditions = test_control.LoopedLayer(), test_control.Conditions()

    def forward(self, x, y, z):
        return self.looped(z, x * 1, y), self.conditions(x, y)


def test_control_flow_is_that_of_python() -> None:
    model, z = Control(), torch.randn(4, 3)
    wrapped = poptorch.inferenceModel(model, options("inductor"))
    for a, b in itertools.product((1.0, -0.5, -3.0), (1.0, -1.0)):
        given = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b]), z
        got = wrapped(*given)
        with torch.no_grad():
            torch.testing.assert_close(got, model(*given))
    assert runs_compiled(wrapped)


def test_prints_and_host_calls_keep_their_order(capfd) -> None:
    """Inductor may move operators; effects stay where the program has them."""
    log = []

    def doubled(x):
        log.append(x.tolist())
        return x.view(-1, 1).expand(-1, 3).T * 2  # lies in memory in another order

    cpu = poptorch.CPU(doubled, "Doubled")

    def forward(x):
        x = show(cpu(show(x, "before") + 1).sum(0) / 3, "between")
        (x,) = poptorch.for_loop(3, lambda a: show(a + 1, "in"), [x])
        return show(x, "after")

    model = poptorch.inferenceModel(Calling(forward), options("inductor", iterations=2))
    assert model(torch.tensor([1.0, 2.0])).tolist() == [7.0, 9.0]
    assert runs_compiled(model)
    assert log == [[0.0], [2.0], [3.0]]  # with zeros when captured, once per execution
    written = capfd.readouterr().err.splitlines()
    lines = [line.replace(".0000", "") for line in written if line[0] != "["]  # that is the log
    assert lines == [
        *("before: (1)", "between: (4)", "in: (5)", "in: (6)", "in: (7)", "after: (7)"),
        *("before: (2)", "between: (6)", "in: (7)", "in: (8)", "in: (9)", "after: (9)"),
    ]


def test_prints_in_training_keep_their_order(capfd) -> None:
    def forward(x):
        first = show(x.sum(), "first")
        second = show((x * x).sum(), "second")
        third = show(torch.full((1,), 7.0), "third", False)
        return third + second * 0 + first

    model = training(Scaled(forward), options("inductor", accumulation=2))
    model(torch.ones(4))
    model(torch.ones(4))
    once = ["first", "second", "third", "second_gradient", "first_gradient"]
    assert titles(capfd.readouterr().err) == once * 4
