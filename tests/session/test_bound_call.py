"""A call like the last one runs the same program at once. After a change, it is bound again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import options, training
from poptorch._base import private
from poptorch._session.session import Session
from poptorch.backends.driver import LoopExecutable

X, Y = torch.ones(4, 3), torch.zeros(4, 2)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(3, 2), torch.nn.Dropout()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.dropout(self.layer(x)), y)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with each call that is bound to a program."""
    calls: list[None] = []
    bind = Session._bind

    def counted(self: Session, *args: Any) -> Any:
        calls.append(None)
        return bind(self, *args)

    monkeypatch.setattr(Session, "_bind", counted)
    return calls


def trained(opts: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    executor = training(Net(), opts or options())
    executor(X, Y)
    executor(X, Y)
    return executor


def test_calls_of_training_are_bound_once(bound: list[None]) -> None:
    executor = trained()

    executor(X, Y)

    assert len(bound) == 1
    assert executor._session.weights.attached.state.updates == 3


def test_calls_of_inference_are_bound_once(bound: list[None]) -> None:
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())
    expected = executor(X)

    result = executor(X)

    assert len(bound) == 1
    assert torch.equal(result, expected)


def test_a_call_of_a_program_that_draws_nothing_counts_as_a_run() -> None:
    opts = options().randomSeed(3)
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), opts)
    executor.compile(X)
    before = executor.rng_state

    executor(X)

    assert before == [3]
    assert len(executor.rng_state) > 1


def test_calls_within_one_autocast_are_bound_once(bound: list[None]) -> None:
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())

    with torch.autocast("cpu"):
        executor(X)
        result = executor(X)

    assert len(bound) == 1
    assert result.dtype is torch.bfloat16


def load_state(executor: poptorch.PoplarExecutor) -> None:
    executor._optimizer.load_state_dict(executor._optimizer.state_dict())


def renew(executor: poptorch.PoplarExecutor) -> None:
    executor.destroy()
    executor.compile(X, Y)


def change_a_rate(executor: poptorch.PoplarExecutor) -> None:
    executor._optimizer.param_groups[0]["lr"] = 0.5
    executor.setOptimizer(executor._optimizer)


@pytest.mark.parametrize(
    "change",
    [
        lambda executor: executor.model.dropout.eval(),
        load_state,
        renew,
        change_a_rate,
    ],
    ids=["a layer's mode", "loaded state", "another program", "another learning rate"],
)
def test_a_change_between_two_calls_binds_the_second_one_again(
    change: Callable[[poptorch.PoplarExecutor], object], bound: list[None]
) -> None:
    executor = trained()
    change(executor)

    executor(X, Y)
    executor(X, Y)

    assert len(bound) == 2


def test_a_call_of_a_model_that_was_detached_trains_on_its_new_device() -> None:
    executor = trained()
    store = executor._session.weights.store
    executor.detachFromDevice()
    executor.attachToDevice()
    before = executor.model.layer.weight.detach().clone()

    executor(X, Y)

    assert executor._session.weights.store is not store
    assert not torch.equal(executor.model.layer.weight, before)


@pytest.mark.parametrize(
    "unusual",
    [X.double(), X.t().contiguous().t(), X.clone().requires_grad_()],
    ids=["another type", "another layout", "a gradient"],
)
def test_inputs_that_must_be_converted_are_bound_in_each_call(
    unusual: torch.Tensor, bound: list[None]
) -> None:
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())
    expected = executor(X)

    if unusual.dtype is torch.float64:
        with pytest.raises(poptorch.Error, match="Data type mismatch"):
            executor(unusual)
    else:
        assert torch.equal(executor(unusual), expected)

    assert len(bound) == 2
    assert torch.equal(executor(X), expected)


class Subclass(torch.Tensor):
    pass


def without_memory() -> torch.Tensor:
    tensor = X.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


UNREADY = {
    "another type": X.double(),
    "an integer type": X.int(),
    "another layout": X.t().contiguous().t(),
    "a gradient": X.clone().requires_grad_(),
    "more rows": torch.ones(5, 3),
    "more dimensions": X[None],
    "a parameter": torch.nn.Parameter(X.clone(), requires_grad=False),
    "a subclass": X.as_subclass(Subclass),
    "another device": X.to("meta"),
    "a sparse tensor": X.to_sparse(),
    "no memory": without_memory(),
    "no tensor": 1.0,
}


@pytest.fixture(params=["with torch's comparison", "without it"])
def usual_call(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> poptorch.PoplarExecutor:
    """A model after calls with X, whose comparison with later calls has been made."""
    if request.param == "without it":
        path, lost = private.ROWS["TensorGuards"]
        monkeypatch.setitem(private.ROWS, "TensorGuards", (f"{path}_renamed", lost))
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), options())
    for _ in range(3):
        executor(X)
    return executor


@pytest.mark.parametrize("kind", UNREADY)
def test_an_unusual_input_is_never_taken_for_that_of_the_last_call(
    kind: str, usual_call: poptorch.PoplarExecutor
) -> None:
    call = usual_call._session._bound
    assert call is not None

    tensors = call.tensors_of(((UNREADY[kind],), {}))

    assert tensors is None


@pytest.mark.parametrize("count", [0, 2])
def test_another_number_of_inputs_is_never_taken_for_that_of_the_last_call(
    count: int, usual_call: poptorch.PoplarExecutor
) -> None:
    call = usual_call._session._bound
    assert call is not None

    tensors = call.tensors_of(((X,) * count, {}))

    assert tensors is None


def test_other_tensors_of_the_same_kind_are_ready(usual_call: poptorch.PoplarExecutor) -> None:
    call = usual_call._session._bound
    assert call is not None
    others = (X + 1,)

    tensors = call.tensors_of((others, {}))

    assert tensors is others


def test_calls_in_inference_mode_and_outside_of_it_are_bound_once(
    bound: list[None], usual_call: poptorch.PoplarExecutor
) -> None:
    expected = usual_call(X)
    with torch.inference_mode():
        results = [usual_call(X), usual_call(X.clone())]

    result = usual_call(X)

    assert len(bound) == 1
    assert all(torch.equal(each, expected) for each in (*results, result))


class Weighted(torch.nn.Module):
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, *, shift: torch.Tensor, half: bool = False
    ) -> torch.Tensor:
        return x * weight + shift / 2 if half else x * weight + shift


@pytest.mark.parametrize(
    "named",
    [
        {"x": X, "weight": 2 * X, "shift": 3 * X},
        {"shift": 3 * X, "weight": 2 * X, "x": X},
    ],
    ids=["in the order of forward", "in another order"],
)
def test_calls_that_pass_tensors_by_name_are_bound_once(
    named: dict[str, torch.Tensor], bound: list[None]
) -> None:
    executor = poptorch.inferenceModel(Weighted(), options())

    results = [executor(**named) for _ in range(3)]

    assert len(bound) == 1
    assert all(torch.equal(result, X * 5) for result in results)


def test_a_call_by_position_and_by_name_is_like_one_by_name(bound: list[None]) -> None:
    executor = poptorch.inferenceModel(Weighted(), options())
    executor(x=X, weight=X, shift=X)

    result = executor(X, 2 * X, shift=3 * X)

    assert len(bound) == 1
    assert torch.equal(result, X * 5)


@pytest.mark.parametrize(
    ("args", "named", "error"),
    [
        ((X, X), {"weight": X, "shift": X}, "passed more than once"),
        ((X, X), {"shifts": X}, "not a valid parameter"),
        ((X,), {"weight": X}, "Mandatory parameter 'shift' missing"),
        ((X, X, X), {"shift": X}, "Too many arguments"),
    ],
)
def test_a_call_with_wrong_names_is_refused_after_a_call_with_the_right_ones(
    args: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor], error: str
) -> None:
    executor = poptorch.inferenceModel(Weighted(), options())
    executor(x=X, weight=X, shift=X)

    with pytest.raises(Exception, match=error):
        executor(*args, **named)

    assert torch.equal(executor(x=X, weight=X, shift=X), X + X)


def test_another_value_of_an_argument_that_is_no_tensor_is_refused_by_name_too() -> None:
    executor = poptorch.inferenceModel(Weighted(), options())
    executor(X, X, shift=X)

    with pytest.raises(poptorch.Error, match="half"):
        executor(X, X, shift=X, half=True)


def test_a_call_that_passes_a_default_explicitly_is_like_one_without_it() -> None:
    executor = poptorch.inferenceModel(Weighted(), options())
    expected = executor(X, X, shift=X, half=False)

    assert torch.equal(executor(X, X, shift=X), expected)


class AnyNames(torch.nn.Module):
    def forward(self, **tensors: torch.Tensor) -> torch.Tensor:
        return tensors["a"] - tensors["b"]


def test_variable_keyword_inputs_are_matched_by_name() -> None:
    executor = poptorch.inferenceModel(AnyNames(), options())
    executor(a=X, b=2 * X)

    result = executor(b=X, a=3 * X)

    assert torch.equal(result, 2 * X)


def test_a_shorter_batch_leaves_the_program_of_whole_batches_to_the_next_call() -> None:
    executor = poptorch.inferenceModel(torch.nn.Linear(3, 2), options(iterations=2))
    expected = executor(X)

    short = executor(X[:2])

    assert torch.equal(short, expected[:2])
    assert torch.equal(executor(X), expected)


def test_a_destroyed_model_keeps_no_program_for_the_next_call() -> None:
    executor = trained()

    executor.destroy()

    assert executor._session._bound is None


class Looking(torch.nn.Module):
    """An embedding of three rows, whose indices are not checked before a call."""

    def __init__(self, observe: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(3, 2)
        self._observe = None if observe is None else poptorch.CPU(observe, "observe")

    def forward(self, at: torch.Tensor) -> torch.Tensor:
        if self._observe is not None:
            at = self._observe(at)
        return self.table(at)


def looking(observe: Callable[..., Any] | None = None) -> poptorch.PoplarExecutor:
    """Return a model of inference after calls that make later ones short."""
    opts = options().checkAgainstEager("off")
    opts.Precision.checkIndices(False)
    executor = poptorch.inferenceModel(Looking(observe), opts)
    for _ in range(3):
        executor(torch.tensor([0, 2]))
    return executor


def refuse_to_run(*args: Any) -> None:
    raise AssertionError("this call was not short")


def test_later_calls_of_inference_run_the_graph_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = looking()
    monkeypatch.setattr(LoopExecutable, "run", refuse_to_run)

    result = executor(torch.tensor([2, 1]))

    assert torch.equal(result, executor.model.table.weight[[2, 1]])


def test_short_calls_follow_new_weights() -> None:
    executor = looking()
    with torch.no_grad():
        executor.model.table.weight.mul_(2)
    executor.copyWeightsToDevice()

    result = executor(torch.tensor([2, 1]))

    assert torch.equal(result, executor.model.table.weight[[2, 1]])


@pytest.mark.parametrize("enabled", [True, False])
def test_short_calls_leave_the_mode_of_autograd_as_it_was(enabled: bool) -> None:
    executor = looking()

    with torch.set_grad_enabled(enabled):
        result = executor(torch.tensor([2, 1]))
        after = torch.is_grad_enabled()

    assert after is enabled
    assert not result.requires_grad


def test_a_short_call_that_fails_names_the_operator_and_later_ones_work() -> None:
    executor = looking()

    with pytest.raises(poptorch.Error, match="embedding"):
        executor(torch.tensor([7, 1]))

    result = executor(torch.tensor([2, 1]))
    assert torch.equal(result, executor.model.table.weight[[2, 1]])


def test_a_host_function_that_raises_an_exception_is_called_once() -> None:
    calls = []

    def observe(at: torch.Tensor) -> torch.Tensor:
        calls.append(at.tolist())
        if at.max() > 2:
            raise ValueError("too large")
        return at

    executor = looking(observe)
    calls.clear()

    with pytest.raises(ValueError, match="too large"):
        executor(torch.tensor([7, 1]))

    assert calls == [[7, 1]]
