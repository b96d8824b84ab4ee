"""Where forward asks for values: constants answer, branches freeze, numbers explain themselves."""

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.cases import long
from helpers.wrapping import (
    Calling,
    Having,
    agrees,
    infer,
    options,
    training,
    trains_alike,
    unchecked,
)

CLOSED_OVER = torch.tensor([10.0, 20.0])


def constants(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    literal, grid = torch.tensor([3, 4]), torch.arange(4).view(2, 2)
    grid[0] += 5
    assert grid.tolist() == [[5, 6], [2, 3]]
    assert CLOSED_OVER.numpy().tolist() == [10.0, 20.0]
    assert float(CLOSED_OVER.max()) == 20.0
    assert 6 in grid
    assert torch.equal(literal, torch.tensor([3, 4]))
    assert str(literal) == "tensor([3, 4])"
    assert f"{CLOSED_OVER.max():.1f}" == "20.0"
    assert (CLOSED_OVER.max() * 1j).item() == 20j
    return x * int(literal[0]), x[: literal.sum() - 6]


def conditions(x: torch.Tensor) -> Any:
    y = torch.ones(3)
    assert (x > -5).all()
    assert not torch.equal(x, y[:2])
    if not torch.allclose(x, y) and not torch.equal(x, y) and 5.0 not in x:
        x = x + 1
    while x.max() < 10 and torch.equal(x, x * 1) and torch.allclose(x, x + 1, 0.0, 2.0):
        x = x.abs() * 2 + 1
    return x, F.gaussian_nll_loss(x, y, torch.ones(3)), x.masked_fill(x > 2, 9.0)


@pytest.mark.slow
@pytest.mark.spec("supported_ops", 9, 10)
@pytest.mark.parametrize("function", [constants, conditions])
def test_a_read_of_a_value_has_the_result_of_eager_torch(function: Callable[..., Any]) -> None:
    agrees(function, torch.tensor([0.5, 2.5, -1.5]), check_dtype=False)
    with pytest.raises(ValueError, match="Expected parameter"):  # outside they look
        torch.distributions.Normal(torch.ones(3), -torch.ones(3))


def branch(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    model.calls += 1
    out = x * model.weight if x.sum() > 0 else x - model.weight  # the first inputs decide
    return out, poptorch.identity_loss(out, "sum")


def branching() -> Having:
    return Having(branch, calls=torch.zeros(()), weight=nn.Parameter(torch.tensor(3.0)))


def test_a_branch_is_frozen_to_the_path_of_the_first_inputs() -> None:
    model, x = poptorch.inferenceModel(branching(), options()), torch.tensor([1.0, 2.0])

    first, opposite = model(x)[0], model(-x)[0]

    assert first.tolist() == [3.0, 6.0]
    assert opposite.tolist() == [-3.0, -6.0]


def test_a_warning_names_the_line_and_the_value_of_a_frozen_branch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poptorch.inferenceModel(branching(), options())(torch.tensor([1.0, 2.0]))

    (text,) = [text for text in caplog.messages if "branches on the values" in text]
    assert "test_value_reads.py" in text
    assert "if x.sum() > 0 else" in text
    assert "bool(tensor) is True" in text


def test_deciding_a_branch_leaves_state_and_random_numbers_as_they_are() -> None:
    model = branching()
    trained, before = training(model, options(iterations=2)), torch.get_rng_state()

    trained.compile(-torch.ones(4))

    assert model.calls == 0
    assert model.weight == 3.0
    assert torch.equal(torch.get_rng_state(), before)


def test_training_takes_the_branch_of_the_inputs_that_it_was_compiled_with() -> None:
    """The weight grows by the rate 0.1 times two rows, in each of two iterations."""
    model = branching()
    trained = training(model, options(iterations=2))
    trained.compile(-torch.ones(4))

    trained(torch.ones(4))

    assert model.calls == 2
    assert model.weight == 3.0 + 2 * 0.1 * 2


def test_the_first_micro_batch_decides_and_a_truth_is_a_branch(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (x + 1, F.dropout(x)) if (x.max() > 0).item() else (x - 1, x)

    x = torch.ones(1000).repeat_interleave(2) * torch.tensor([1.0, -1.0]).repeat_interleave(1000)
    shifted, dropped = infer(
        forward, x, opts=options(iterations=2).outputMode(poptorch.OutputMode.All)
    )
    assert torch.equal(shifted, x + 1)
    assert not torch.equal(dropped[:1000] == 0, dropped[1000:] == 0)  # masks stay random
    assert "(x.max() > 0).item()" in caplog.text


NUMBERS = {
    ".item()": lambda x: x * (2 - x.sum().item() // 3),
    "int()": lambda x: int(x.sum()),
    "float()": lambda x: float(x.sum()),
    ".tolist()": lambda x: x.tolist(),
    ".numpy()": lambda x: x.numpy(),
    "numpy.asarray()": lambda x: np.asarray(x),
    "an index": lambda x: range(x.int()[0]),
}


def asks_for_numbers(x: torch.Tensor) -> torch.Tensor:
    """Ask in every way for the values of a tensor that is no constant."""
    table = torch.zeros(3)
    table[0] = x.sum()
    for ask in NUMBERS.values():
        ask(table[:2])
    return x


def test_explain_lists_each_number_that_is_read_from_a_tensor() -> None:
    wrapped = poptorch.inferenceModel(Calling(asks_for_numbers), options())

    findings = wrapped.explain(torch.ones(2))

    assert [found.what for found in findings] == [f"{n} needs a tensor's value" for n in NUMBERS]


@pytest.mark.parametrize("part", [".item()", "test_value_reads.py", "poptorch.ipu_print_tensor"])
def test_the_error_about_a_value_says_what_asked_for_it_where_and_what_to_use(part: str) -> None:
    with pytest.raises(poptorch.Error, match="value is needed") as caught:
        infer(asks_for_numbers, torch.ones(2))

    assert part in str(caught.value)


@pytest.mark.parametrize(
    "use",
    [lambda x, n: x[:n], lambda x, n: torch.full((2,), n), lambda x, n: x + -n],
    ids=["a slice", "a constant", "arithmetic"],
)
def test_an_integer_of_a_tensor_cannot_be_used_as_a_number(use: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match="value is needed") as caught:
        infer(lambda x: use(x, x.sum().int().item()), torch.ones(2))

    assert "x.sum().int().item()" in str(caught.value)


def test_a_number_may_be_checked_and_decide_and_its_line_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def checked(model: Having, x: torch.Tensor) -> torch.Tensor:
        assert x.isnan().sum().item() == 0
        count = (x > -9).sum().item()
        most = x.max().item()
        scale = 2 if count - 1 > 0 and min(most / 2, 7) < 5 and f"{most:.1f}" else 3
        return F.mse_loss(scale * model.weight * x, x)

    model = Having(checked, weight=nn.Parameter(torch.full((1,), 0.5)))
    assert trains_alike(model, torch.randn(8, 3), accumulation=4).plan().program.lanes is not None
    lines = [text for text in caplog.messages if "branches on the values" in text]
    assert len(lines) == 3
    assert all("test_value_reads.py" in line for line in lines)


def test_printing_shows_no_values_and_says_so_once(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    # The check against eager PyTorch would print the values, too.
    printing = Calling(lambda x: (print(x), print(f"{x.sum():.3f}"), x)[2])
    poptorch.inferenceModel(printing, unchecked())(torch.full((2,), 7.0))
    shown, total = capsys.readouterr().out.splitlines()
    assert shown == "tensor(<unavailable>, size=(2,), dtype=torch.float32, device=cpu)"
    assert "<unavailable>" in total
    assert ["print(x)" in m for m in caplog.messages if "prints a tensor" in m] == [True]


@pytest.mark.spec("supported_ops", 9, 10)
@pytest.mark.parametrize(
    "select, phrase",
    [
        (torch.nonzero, "dynamic output shapes"),
        (lambda x: x[x > 1], "dynamic output shapes"),
        (lambda x: x.masked_select(x > 1), "dynamic output shapes"),
        *(
            (lambda x, use=use: use(x.long().masked_select(x > 1)), "dynamic output shapes")
            for use in (len, lambda selected: torch.cat([selected, selected]), lambda s: s + 1)
        ),
        (lambda x: x.long().masked_select(x.byte()), "BoolTensor"),
        (lambda x: torch.nonzero(x) if x.sum() > 0 else x, "dynamic output shapes"),
        (lambda x: F.one_hot(x.long()), "`num_classes` must be specified and must be con"),
        (lambda x: torch.bincount(x.long()), "`minlength` must be specified and must be a con"),
        (lambda x: x[x.long()[1] :], "cannot be determined"),
        (lambda x: x[x.long()[1] : 2 * x.long()[1]], "cannot be determined"),
    ],
)
def test_shapes_cannot_depend_on_values(select: Callable[..., Any], phrase: str) -> None:
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        infer(lambda x: select(x), torch.arange(4.0))
    assert "test_value_reads.py" in str(caught.value)


@pytest.mark.parametrize("backend", ["reference", long("inductor")])
def test_slices_that_eager_torch_makes_shorter_are_refused(backend: str) -> None:
    x = torch.arange(10.0).view(5, 2)
    model = poptorch.inferenceModel(Calling(lambda x, i: x[i : i + 3]), options(backend))
    for start in (0, 2, -5, -4):
        assert torch.equal(model(x, torch.tensor(start)), x[start : start + 3])
    for start in (3, 5, -3, -1, -6):
        with pytest.raises(IndexError):
            model(x, torch.tensor(start))


def short_cut(model: Having, x: torch.Tensor) -> torch.Tensor:
    y = x * model.weight if (model.mask == 1).all() else x * model.weight * model.mask
    if model.changes:
        model.mask.mul_(0.5)
    return poptorch.identity_loss(y.sum(), reduction="none")


def masked(mask: torch.Tensor, changes: bool = False) -> poptorch.PoplarExecutor:
    weight = nn.Parameter(torch.full((3,), 2.0))
    model = Having(short_cut, weight=weight, mask=mask, changes=changes)
    return poptorch.trainingModel(model, options(accumulation=2))


KINDS_OF_MASKS: dict[str, Callable[[], torch.Tensor]] = {
    "buffer": lambda: torch.ones(3),
    "frozen weight": lambda: nn.Parameter(torch.ones(3), requires_grad=False),
}
IN_TWO = torch.ones(2, 3)


@pytest.fixture(params=KINDS_OF_MASKS)
def short_cutting(request: pytest.FixtureRequest) -> poptorch.PoplarExecutor:
    """A model that branches on a mask of ones, after a call."""
    executor = masked(KINDS_OF_MASKS[request.param]())
    assert float(executor(IN_TWO)) == 6.0
    return executor


def test_a_branch_on_a_tensor_that_stays_as_it_is_needs_no_inputs(
    short_cutting: poptorch.PoplarExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    assert short_cutting.plan().program.lanes is not None
    assert "branches" not in caplog.text


def test_a_change_of_a_tensor_in_a_branch_condition_causes_one_warning(
    short_cutting: poptorch.PoplarExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    nn.init.zeros_(short_cutting.model.mask)

    for _ in range(2):
        short_cutting.copyWeightsToDevice()
        short_cutting.detachFromDevice()
        assert float(short_cutting(IN_TWO)) > 0.0

    assert caplog.text.count("of 'mask', on which forward branches at test_value_reads.py:") == 1


def test_a_program_that_is_compiled_again_branches_on_new_values(
    short_cutting: poptorch.PoplarExecutor,
) -> None:
    nn.init.zeros_(short_cutting.model.mask)

    short_cutting.destroy()

    assert float(short_cutting(IN_TWO)) == 0.0


def test_a_branch_on_a_tensor_that_forward_writes_is_decided_by_the_first_inputs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = masked(torch.ones(3), changes=True)
    assert float(executor(torch.ones(2, 3))) == 6.0
    assert "is True for the first inputs" in caplog.text
    assert executor.plan().program.lanes is not None


def test_a_check_inside_a_function_of_torch_is_not_called_a_branch_of_forward(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def loss(x: torch.Tensor) -> torch.Tensor:
        return F.gaussian_nll_loss(x, torch.zeros(4, 3), x.square() + 1)

    agrees(loss, torch.randn(4, 3))

    (message,) = (text for text in caplog.messages if "test_value_reads.py" in text)
    assert "A function of torch that forward calls" in message


def _number(x: torch.Tensor) -> torch.Tensor:
    try:
        shift = int(x[0, 0])
    except Exception:
        shift = 0
    return x + 1 + shift


def _list(x: torch.Tensor) -> torch.Tensor:
    with contextlib.suppress(Exception):
        return x + x.tolist()[0][0]
    return x


def _unique(x: torch.Tensor) -> torch.Tensor:
    try:
        return x + torch.unique(x).sum()
    except RuntimeError:
        return x


def _elements(x: torch.Tensor) -> torch.Tensor:
    try:
        return x + x[x > 0].sum()
    except (RuntimeError, IndexError):
        return x


def _returned(x: torch.Tensor) -> torch.Tensor:
    shift = 0
    try:
        shift = int(x[0, 0])
    finally:
        return x + shift  # noqa: B012 (this form also catches the refusal)


def _counted(x: torch.Tensor) -> torch.Tensor:
    try:
        return x + torch.bincount(x.flatten().long()).sum()
    except Exception:
        return x


@pytest.mark.parametrize("function", [_number, _list, _unique, _elements, _returned, _counted])
def test_a_refusal_that_forward_catches_is_raised_when_it_returns(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    executor = poptorch.inferenceModel(Calling(function), options())

    with pytest.raises(poptorch.Error, match=r"value is needed|dynamic output|minlength"):
        executor(torch.zeros(4, 3))


def test_a_branch_on_values_within_a_bare_except_is_decided_by_the_first_inputs() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        try:
            if x.sum() > 1:
                return x * 2
        except:  # noqa: E722 (catches every exception)
            pass
        return x * 3

    x = torch.ones(4, 3)
    executor = poptorch.inferenceModel(Calling(doubled), unchecked())

    torch.testing.assert_close(executor(x), doubled(x))
