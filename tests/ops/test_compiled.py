"""PopTorch's own operators in compiled code compute what the interpreter does, in its order."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import poptorch
from helpers import control_flow, custom_functions, exchanges, known_operators
from helpers.known_operators import Function
from helpers.wrapping import Having, Several, options, runs_compiled, training

pytestmark = pytest.mark.slow

show = poptorch.ipu_print_tensor
Capture = pytest.CaptureFixture[str]

X = torch.tensor([[0.5, -1.5], [2.0, 1.0], [-0.5, 3.0], [1.5, 0.75]])
MATRICES = torch.linspace(-1, 1, 24).view(3, 2, 4)
GROUPS = torch.cat([MATRICES, MATRICES.flip(0)], 1)
ENDS = torch.tensor([1, 3, 4], dtype=torch.int32)
ROWS = torch.tensor([1, 0, 0, 1])
OUTPUT_CHANNELS = poptorch.MatMulSerializationMode.OutputChannels


def alignment(a: torch.Tensor) -> torch.Tensor:
    """The batch comes first, so that the layout of scores differs from the order of their
    dimensions.
    """
    scores = F.pad(a, (1, 1)).view(1, 4, 4).expand(2, 4, 4).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(scores, torch.tensor([[1, 2], [3, 1]]), (4, 3), (2, 1))


# The functions that are compiled together, each with its input.
SIDE_BY_SIDE: dict[str, list[tuple[Function, torch.Tensor]]] = {
    "an exchange": [(exchanges.EXCHANGES["gather"][0], X)],
    "exchanges": [(exchanges.EXCHANGES[name][0], X) for name in ("gather", "strided", "to all")],
    "known operators": [(known, x) for known, _, x in known_operators.CASES.values()],
    "products and sums": [
        (lambda a: poptorch.serializedMatMul(a, MATRICES[0], OUTPUT_CHANNELS, 4), X),
        (lambda a: F.grouped_mm(F.pad(a, (0, 2)), GROUPS, offs=ENDS), X),
        (lambda a: torch.zeros(2, 2).index_add(0, ROWS, a), X),
        (alignment, X),
    ],
}


def trained_alike(
    functions: Sequence[Function], inputs: Sequence[torch.Tensor], replicas: int = 1
) -> None:
    """Compare what both backends make of functions, each with its own weight."""
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    batch = [torch.cat([x + at for at in range(replicas)]) for x in inputs]
    found = []
    for backend in ("reference", "inductor"):
        model = Several(functions, weights)
        executor = training(model, options(backend, replicas=replicas))
        outs, _ = executor(*batch)
        assert runs_compiled(executor) == (backend == "inductor")
        trained = [weight.detach() for weight in model.weights]
        found.append([*zip(outs, trained, strict=True)])

    for at, (interpreted, compiled) in enumerate(zip(*found, strict=True)):
        torch.testing.assert_close(compiled, interpreted, msg=lambda text, at=at: f"{at}: {text}")
        assert not torch.equal(compiled[1], weights[at]), f"weight {at} was not trained"


@pytest.mark.parametrize("kind", SIDE_BY_SIDE)
def test_operators_train_side_by_side_as_interpreted(kind: str) -> None:
    """Operators of one kind are in one program, because compiling one program takes less time."""
    functions, inputs = zip(*SIDE_BY_SIDE[kind], strict=True)
    # A last operator that makes no error larger: sin(exp(a)) makes one unit of exp a thousandth.
    turning = [lambda a, f=f: f(a).square().log1p() for f in functions]

    trained_alike(turning, inputs, exchanges.REPLICAS)


def printed(capfd: Capture) -> list[str]:
    """Return what was printed, without the log and zeros behind a point."""
    lines = capfd.readouterr().err.splitlines()
    return [line.replace(".0000", "") for line in lines if not line.startswith("[")]


def test_custom_operators_and_prints_train_as_interpreted(capfd: Capture) -> None:
    """Both backends print in the program's order, gradients in the opposite order."""

    def both(x: torch.Tensor) -> torch.Tensor:
        first, second = show(x.sum(), "first"), show((x * x).sum(), "second")
        third = show(torch.full((1,), 7.0), "third", False)
        return custom_functions.two(custom_functions.turned(x)) + third + second * 0 + first

    trained_alike([both], [X[:1]])

    titles = [line.partition(":")[0] for line in printed(capfd)]
    assert titles == ["first", "second", "third", "second_gradient", "first_gradient"] * 2


def printing_loop(model: Having, x: torch.Tensor) -> torch.Tensor:
    """Print before, in and after a loop of two turns."""
    (u,) = poptorch.for_loop(2, lambda a: show(a + 1, "in"), [show(x * 2, "before")])
    return show(u, "after")


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_a_loop_prints_as_often_as_python_would(backend: str, capfd: Capture) -> None:
    """Compiled, it needs all of torch's headers, whose compilation takes seven seconds."""
    wrapped = poptorch.inferenceModel(Having(printing_loop), options(backend))

    wrapped(torch.tensor([-3.0]))

    assert printed(capfd) == ["before: (-6)", "in: (-5)", "in: (-4)", "after: (-4)"]
    assert runs_compiled(wrapped) == (backend == "inductor")


def looped_and_conditional(
    model: Having, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor
) -> tuple[Any, ...]:
    """Loops, conditions, and prints before, in and after a loop."""
    sums = control_flow.power_sums(x * 1, y)
    return model.looped(z), sums, model.conditions(x, y), printing_loop(model, x[:1])


@pytest.mark.larger("test_a_loop_prints_as_often_as_python_would")
def test_control_flow_is_that_of_python(capfd: Capture) -> None:
    """One program takes all ways, and prints as often as Python would."""
    parts = {"looped": control_flow.looping_model(), "conditions": control_flow.Conditions()}
    model = Having(looped_and_conditional, **parts)
    wrapped = poptorch.inferenceModel(model, options("inductor"))
    z = torch.randn(4, 3)

    for a, b in itertools.product((1.0, -0.5, -3.0), (1.0, -1.0)):
        given = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b]), z

        got, lines = wrapped(*given), printed(capfd)

        with torch.no_grad():
            torch.testing.assert_close(got, model(*given))
        assert lines == [
            f"before: ({2 * a:.0f})",
            f"in: ({2 * a + 1:.0f})",
            f"in: ({2 * a + 2:.0f})",
            f"after: ({2 * a + 2:.0f})",
        ]
    assert runs_compiled(wrapped)
