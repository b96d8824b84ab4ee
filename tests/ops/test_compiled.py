"""Operators of ours in compiled code: what the interpreter makes of them, in its order."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers import custom_functions
from helpers.wrapping import Having, Several, options, runs_compiled, training
from ops import test_control, test_known
from ops.test_debug import show

pytestmark = pytest.mark.slow
X = torch.tensor([[0.5, -1.5], [2.0, 1.0], [-0.5, 3.0], [1.5, 0.75]])
MATRICES = torch.linspace(-1, 1, 24).view(3, 2, 4)
GROUPS = torch.cat([MATRICES, MATRICES.flip(0)], 1)
ENDS = torch.tensor([1, 3, 4], dtype=torch.int32)
ROWS = torch.tensor([1, 0, 0, 1])


def alignment(a):
    """The batch comes first, so that scores do not lie as their dimensions say."""
    scores = F.pad(a, (1, 1)).view(1, 4, 4).expand(2, 4, 4).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, torch.tensor([[1, 2], [3, 1]]), (4, 3), (2, 1))


PRODUCT = poptorch.MatMulSerializationMode.OutputChannels
SIDE_BY_SIDE = {
    **{name: (known, x) for name, (known, _, x) in test_known.CASES.items()},
    **{name: (test_known.EXCHANGES[name][0], X) for name in ("gather", "strided", "to all")},
    "product": (lambda a: poptorch.serializedMatMul(a, MATRICES[0], PRODUCT, 4), X),
    "products of groups": (lambda a: F.grouped_mm(F.pad(a, (0, 2)), GROUPS, offs=ENDS), X),
    "alignment": (alignment, X),
    "sums of rows": (lambda a: torch.zeros(2, 2).index_add(0, ROWS, a), X),
}


def trained_alike(functions, inputs, replicas: int = 1) -> None:
    """Compare what both backends make of functions, each with a weight of its own."""
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    batch, found = [torch.cat([x + at for at in range(replicas)]) for x in inputs], []
    for backend in ("reference", "inductor"):
        model = Several(functions, weights)
        executor = training(model, options(backend, replicas=replicas))
        outs, _ = executor(*batch)
        assert runs_compiled(executor) == (backend == "inductor")
        found.append([*zip(outs, (weight.detach() for weight in model.weights), strict=True)])
    for at, (theirs, ours) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(ours, theirs, msg=lambda text, at=at: f"{at}: {text}")
        assert not torch.equal(ours[1], weights[at])


def test_operators_train_side_by_side_as_interpreted() -> None:
    functions, inputs = zip(*SIDE_BY_SIDE.values(), strict=True)
    # A last operator that makes no error larger: sin(exp(a)) makes one unit of exp a thousandth.
    turning = [lambda a, f=f: f(a).square().log1p() for f in functions]
    trained_alike(turning, inputs, test_known.REPLICAS)


def printed(capfd) -> list[str]:
    """Return what was printed, without the log and zeros behind a point."""
    lines = capfd.readouterr().err.splitlines()
    return [line.replace(".0000", "") for line in lines if not line.startswith("[")]


def test_custom_operators_and_prints_train_as_interpreted(capfd) -> None:
    def both(x):
        first, second = show(x.sum(), "first"), show((x * x).sum(), "second")
        third = show(torch.full((1,), 7.0), "third", False)
        return custom_functions.two(custom_functions.turned(x)) + third + second * 0 + first

    trained_alike([both], [X[:1]])
    titles = [line.partition(":")[0] for line in printed(capfd)]
    assert titles == ["first", "second", "third", "second_gradient", "first_gradient"] * 2


def control(model, x, y, z):
    (u,) = poptorch.for_loop(2, lambda a: show(a + 1, "in"), [show(x[:1] * 2, "before")])
    return model.looped(z, x * 1, y), model.conditions(x, y), show(u, "after")


def test_control_flow_is_that_of_python(capfd) -> None:
    looped = Having(test_control.looped, layer=nn.Linear(3, 3), scale=torch.tensor(0.5))
    parts = {"looped": looped, "conditions": test_control.Conditions()}
    model, z = Having(control, **parts), torch.randn(4, 3)
    wrapped = poptorch.inferenceModel(model, options("inductor"))
    for a, b in itertools.product((1.0, -0.5, -3.0), (1.0, -1.0)):
        given = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b]), z
        got, lines = wrapped(*given), printed(capfd)
        with torch.no_grad():
            torch.testing.assert_close(got, model(*given))
        told = {"before": 2 * a, "in": 2 * a + 1, "in ": 2 * a + 2, "after": 2 * a + 2}
        assert lines == [f"{name.strip()}: ({value:.0f})" for name, value in told.items()]
    assert runs_compiled(wrapped)
