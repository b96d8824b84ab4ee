"""``for_loop`` and ``cond``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.control_flow import Conditions, looping_model, power_sums
from helpers.wrapping import Calling, Scaled, agrees, graph_of, infer, options, training, unchecked


@pytest.mark.slow
@pytest.mark.spec("ops", 8)
def test_nested_loops_compute_the_results_of_python_loops() -> None:
    agrees(looping_model(), torch.randn(4, 3))


@pytest.mark.slow
@pytest.mark.spec("ops", 8)
def test_a_loop_carries_its_values_from_iteration_to_iteration() -> None:
    """Five times doubled and shifted: 32 times the value, and 1 + 2 + 4 + 8 + 16 times the step."""
    y, step = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])

    (value, count), same = infer(power_sums, y.clone(), step)

    assert torch.equal(value, 32 * y + 31 * step)
    assert count.tolist() == [5, 5]
    assert torch.equal(same, y)  # the body wrote to a copy


@pytest.mark.spec("ops", 9)
def test_a_loop_takes_and_returns_lists() -> None:
    kinds = []

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        out = poptorch.for_loop(3, lambda a: a * 2, [x])
        kinds.append(type(out))
        return out

    (out,) = infer(forward, torch.ones(3))

    assert set(kinds) == {list}
    assert out.tolist() == [8.0, 8.0, 8.0]


@pytest.mark.spec("ops", 9)
def test_the_body_of_a_loop_is_captured_once() -> None:
    calls = []

    def body(a: torch.Tensor) -> torch.Tensor:
        calls.append(a)
        return a * 2

    forward = Calling(lambda x: poptorch.for_loop(1000, body, [x]))
    model = poptorch.inferenceModel(forward, unchecked())

    (out,) = model(torch.zeros(3))

    assert len(calls) == 1
    assert len(graph_of(model).nodes) < 10
    assert out.sum() == 0


def inputs_in_one_memory(x: torch.Tensor) -> Any:
    """Inputs that overlap in memory are separate in a body."""
    y = x + 1

    def body(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a += 10
        return a, b, c + x[0] + x[1:]

    return poptorch.for_loop(2, body, [y[:2], y[1:], y[:2]]), y


def writes_in_a_branch(x: torch.Tensor) -> Any:
    """The caller's tensor keeps its value."""
    y = x + 1
    return poptorch.cond(x.sum() > 0, lambda a: a.mul_(3), [y], lambda a: a, [y]), y


def loop_of_constants(x: torch.Tensor) -> Any:
    """The result of a loop over constants feeds another loop, and one of no turns."""
    (a,) = poptorch.for_loop(4, lambda a: a * 2, [torch.ones(3)])
    (b,) = poptorch.for_loop(2, lambda b: b + a, [x])
    never = poptorch.for_loop(0, lambda b: b + a, [x])
    return x * 1, b, never


@pytest.mark.slow
@pytest.mark.parametrize("function", [inputs_in_one_memory, writes_in_a_branch, loop_of_constants])
def test_a_body_works_on_copies(function: Callable[[torch.Tensor], Any]) -> None:
    agrees(function, torch.arange(3.0))


def drawn_in_a_loop(seed: int) -> torch.Tensor:
    """Return four random numbers, one of each turn of a loop."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return poptorch.for_loop(4, lambda a: torch.cat([a[1:], torch.rand(1)]), [x])[0]

    return infer(forward, torch.zeros(4), opts=options().randomSeed(seed))


@pytest.fixture(scope="module")
def drawn_with_seed_3() -> torch.Tensor:
    return drawn_in_a_loop(seed=3)


@pytest.mark.spec("supported_ops", 29)
def test_random_numbers_differ_from_iteration_to_iteration(drawn_with_seed_3: torch.Tensor) -> None:
    assert len(set(drawn_with_seed_3.tolist())) == 4


@pytest.mark.spec("supported_ops", 29)
@pytest.mark.parametrize("seed, equal", [(3, True), (4, False)])
def test_random_numbers_in_a_loop_repeat_with_the_seed(
    seed: int, equal: bool, drawn_with_seed_3: torch.Tensor
) -> None:
    assert torch.equal(drawn_in_a_loop(seed), drawn_with_seed_3) == equal


def test_python_cannot_read_a_random_number_in_a_loop() -> None:
    """Each turn has another number, and the body is captured once."""

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return poptorch.for_loop(2, lambda a: a * bool(torch.rand(()) > 0), [x])

    with pytest.raises(poptorch.Error, match="value is needed while"):
        infer(forward, torch.zeros(4))


def one_condition(x: torch.Tensor) -> list[torch.Tensor]:
    return poptorch.cond(x.sum() > 0, lambda a: a * 2, [x], lambda a: a - 1, [x])


@pytest.mark.spec("ops", 9, 10)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_condition_decides_at_run_time(sign: float) -> None:
    """A program captured with an input that takes one way takes the other, too."""
    wrapped = poptorch.inferenceModel(Calling(one_condition), options())
    wrapped.compile(torch.tensor([1.0, 1.25]))
    x = sign * torch.tensor([1.0, 1.25])

    (got,) = wrapped(x)

    assert torch.equal(got, x * 2 if sign > 0 else x - 1)


@pytest.mark.larger("test_a_condition_decides_at_run_time")
@pytest.mark.spec("ops", 9, 10)
@pytest.mark.parametrize("a, b", [(1.0, 1.0), (1.0, -1.0), (-0.5, 1.0), (-3.0, -1.0)])
def test_nested_conditions_decide_at_run_time(a: float, b: float) -> None:
    """A program captured with inputs that take one way takes the others, too."""
    wrapped = poptorch.inferenceModel(Conditions(), options())
    wrapped.compile(torch.tensor([1.0, 1.25]), torch.tensor([1.0, 2.0]))
    x, y = torch.tensor([a, a + 0.25]), torch.tensor([b, 2 * b])

    got = wrapped(x, y)

    with torch.no_grad():
        torch.testing.assert_close(got, Conditions()(x, y))


@pytest.mark.spec("ops", 9, 10)
def test_both_bodies_of_a_condition_are_captured_once() -> None:
    captured = []

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        def then(a: torch.Tensor) -> torch.Tensor:
            captured.append("then")
            return a * 2

        def otherwise(a: torch.Tensor) -> torch.Tensor:
            captured.append("else")
            return a - 1

        return poptorch.cond(x.sum() > 0, then, [x], otherwise, [x])

    wrapped = poptorch.inferenceModel(Calling(forward), unchecked())

    for sign in (1.0, -1.0):
        wrapped(sign * torch.tensor([1.0, 1.25]))

    assert sorted(captured) == ["else", "then"]


@pytest.mark.parametrize(
    "flag, expected", [(True, torch.ones(2, 3)), (False, torch.tensor([[2.0, 4, 6], [8, 10, 12]]))]
)
def test_bodies_may_differ_in_shape_and_inputs(flag: bool, expected: torch.Tensor) -> None:
    """Their results are given the shape of the second body; Python's own branch may precede."""

    def forward(flag: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        x = x + 1 if x.sum() > 0 else x
        return poptorch.cond(flag, lambda: torch.ones(6), [], lambda a: a.view(2, 3) * 2, [x])

    model = poptorch.inferenceModel(Calling(forward), options())
    model.compile(torch.tensor(True), torch.arange(6.0))

    (got,) = model(torch.tensor(flag), torch.arange(6.0))

    assert torch.equal(got, expected)


@pytest.mark.spec("ops", 11)
@pytest.mark.parametrize(
    "function, name",
    [
        (lambda x: poptorch.for_loop(2, lambda a: a, [x])[0], r"for_loop\(\)"),
        (
            lambda x: poptorch.cond(x.sum() > 0, lambda a: a, [x], lambda a: a, [x])[0],
            r"cond\(\)",
        ),
        (poptorch.CPU(lambda x: x, "Id"), r"poptorch\.CPU"),
    ],
)
def test_training_models_with_control_flow_fail_when_compiled(
    function: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    model = training(Scaled(function))

    with pytest.raises(poptorch.Error, match=rf"{name} is only supported in inference"):
        model.compile(torch.ones(2))
