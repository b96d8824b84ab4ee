"""Steps of optimizers that cannot be traced are refused with what to do."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.traced_steps import (
    Frozen,
    Make,
    Net,
    Pair,
    StepByFunction,
    of,
    step_by_function,
    step_eagerly,
    wrapped,
)
from helpers.wrapping import Having, options

T = torch.optim


def refused(make: Make) -> str:
    pair = Pair(make)
    with pytest.raises(poptorch.Error) as caught:
        pair.training(*pair.batch())
    return str(caught.value)


def test_a_value_that_only_the_device_has_is_refused_with_its_line() -> None:
    message = refused(step_by_function(lambda p, group, state: p.mul_(float(p.norm()))))
    assert "test_traced_step_refusals.py" in message
    assert "float()" in message


def test_a_result_whose_size_depends_on_values_is_refused_with_its_line() -> None:
    message = refused(step_by_function(lambda p, group, state: p[p > 0].mul_(0.5)))
    assert "test_traced_step_refusals.py" in message
    assert "size" in message


def test_random_numbers_in_a_step_are_refused_with_their_line() -> None:
    message = refused(step_by_function(lambda p, group, state: p.add_(torch.randn_like(p))))
    assert "draws random numbers" in message
    assert "test_traced_step_refusals.py" in message


def test_state_that_belongs_to_no_parameter_is_refused() -> None:
    class Keeping(StepByFunction):
        def step(self, closure: Any = None) -> None:
            self.state["all"]["count"] = 1

    assert "not the state of a parameter" in refused(
        lambda model: Keeping(model.parameters(), None)
    )


def test_a_matrix_that_the_step_creates_outside_of_the_state_is_refused() -> None:
    class WithVelocity(StepByFunction):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            weight = self.param_groups[0]["params"][0]
            if not hasattr(self, "velocity"):
                self.velocity = torch.zeros_like(weight)
            weight.sub_(self.velocity.mul_(0.9).add_(weight.grad))

    message = refused(lambda model: WithVelocity(model.parameters(), None))
    assert "velocity, of shape (5, 6)" in message
    assert "store the tensor in the state of a parameter" in message


def test_state_of_a_frozen_parameter_is_refused() -> None:
    class CountingAll(StepByFunction):
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["count"] = 1

    pair = Pair(lambda model: CountingAll(model.parameters(), None), kind=Frozen)
    with pytest.raises(poptorch.Error, match="the state of a parameter that has no gradient"):
        pair.step()


@pytest.mark.parametrize("flag", ["capturable", "differentiable"])
@pytest.mark.parametrize("kind", [T.Adam, T.NAdam], ids=lambda kind: kind.__name__)
def test_a_flag_with_which_steps_in_eager_pytorch_fail_is_refused(
    kind: type[T.Optimizer], flag: str
) -> None:
    make = of(kind, **{flag: True})
    model = Net()
    with pytest.raises((AssertionError, RuntimeError)):
        step_eagerly(model, make(model), (torch.randn(4, 6), torch.zeros(4, dtype=torch.long)))

    with pytest.raises(poptorch.Error, match=f"{flag}=True in parameter group 0"):
        Pair(make)


def test_an_optimizer_of_users_may_have_a_flag_of_the_same_name() -> None:
    def step(p: Any, group: Any, state: Any) -> None:
        p.sub_(p.grad, alpha=group["lr"] * (2 if group["capturable"] else 1))

    pair = Pair(step_by_function(step, capturable=True))
    pair.steps(2)
    pair.assert_alike()


def test_an_accumulator_in_half_is_refused_when_the_model_is_wrapped() -> None:
    def in_half(model: Net) -> torch.optim.Optimizer:
        optimizer = of(T.NAdam)(model)
        optimizer.accum_type = torch.float16
        return optimizer

    with pytest.raises(poptorch.Error, match=r"accum_type of torch\.optim\.nadam\.NAdam"):
        Pair(in_half)


def test_stochastic_rounding_of_weights_in_half_is_refused() -> None:
    opts = options()
    opts.Precision.enableStochasticRounding(True)
    inner = nn.Linear(4, 2).bfloat16()
    model = Having(lambda m, x: poptorch.identity_loss(m.inner(x), "sum"), inner=inner)
    training = poptorch.trainingModel(model, opts, T.NAdam(model.parameters()))
    with pytest.raises(poptorch.Error, match="Stochastic rounding"):
        training(torch.ones(2, 4, dtype=torch.bfloat16))


def test_a_step_that_needs_a_closure_is_refused_when_the_model_is_wrapped() -> None:
    class Closing(StepByFunction):
        def step(self, closure: Any) -> Any:
            return closure()

    with pytest.raises(poptorch.Error, match="Closing: its step needs a closure"):
        Pair(lambda model: Closing(model.parameters(), None))


def test_an_exception_of_a_step_has_a_note_that_the_step_was_traced() -> None:
    def fail(p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        raise KeyError("missing")

    pair = Pair(step_by_function(fail))
    with pytest.raises(KeyError) as caught:
        pair.training(*pair.batch())
    assert "While poptorch traced the step of StepByFunction" in str(caught.value.__notes__)


class Wrapping(T.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.inner = T.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def test_an_optimizer_that_steps_another_one_is_refused_when_the_model_is_wrapped() -> None:
    model = Net()
    with pytest.raises(poptorch.Error, match="its attribute 'inner' is an optimizer"):
        wrapped(model, Wrapping(model.parameters()))


class OfAllNorms(T.Optimizer):
    """Divides the weights that have gradients by the norm of all weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        weights = self.param_groups[0]["params"]
        norm = torch.sqrt(sum(p.square().sum() for p in weights))
        for p in weights:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1).div_(1 + norm)


class DecaysAll(T.Optimizer):
    """Decays weights that have no gradients, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (OfAllNorms, r"an updated value depends on a frozen parameter of shape \(5, 6\)"),
        (DecaysAll, r"a frozen parameter of shape \(5, 6\) is changed"),
    ],
)
def test_a_step_that_uses_frozen_parameters_is_refused(cls: Any, message: str) -> None:
    pair = Pair(lambda model: cls(model.parameters(), {}), kind=Frozen)
    with pytest.raises(poptorch.Error, match=message):
        pair.step()


@pytest.mark.parametrize(
    ("cls", "why"),
    [(T.LBFGS, "it calls the model again within a step"), (T.SparseAdam, "gradients are sparse")],
)
def test_optimizers_of_torch_that_cannot_be_traced_are_refused_by_name_with_the_reason(
    cls: Any, why: str
) -> None:
    model = Net()

    with pytest.raises((poptorch.Error, AssertionError), match=why) as caught:
        wrapped(model, cls(model.parameters()))

    assert cls.__name__ in str(caught.value)


def host_changes(change: Callable[[], object]) -> str:
    """Return the error about a step that changes something on the host each time."""

    def function(p: Any, group: Any, state: Any) -> None:
        change()
        p.sub_(p.grad, alpha=group["lr"])

    return refused(step_by_function(function))


class Counter:
    count = 0


def test_a_step_that_counts_in_a_global_object_is_refused_and_the_count_is_as_before() -> None:
    counter = Counter()

    def change() -> None:
        counter.count += 1

    said = host_changes(change)

    assert "changes values that are not part of the step: variable 'counter'" in said.replace(
        "\n  Got:    ", ": "
    )
    assert "the compiled step runs no Python code" in said
    assert counter.count == 0


def test_a_step_that_counts_in_its_class_is_refused_and_the_count_is_as_before() -> None:
    class Counting(StepByFunction):
        count = 0

        def step(self, closure: Any = None) -> None:
            type(self).count += 1
            super().step()

    said = refused(lambda model: Counting(model.parameters(), lambda p, group, state: None))

    assert "attribute 'count' of the class Counting" in said
    assert Counting.count == 0


def test_a_step_that_counts_in_an_object_in_the_state_is_refused() -> None:
    def function(p: Any, group: Any, state: Any) -> None:
        state.setdefault("counter", Counter()).count += 1

    assert "state 'counter' of 'first.weight'" in refused(step_by_function(function))


def test_an_object_with_tensors_in_the_state_is_refused() -> None:
    def function(p: Any, group: Any, state: Any) -> None:
        if not state:
            state["held"] = SimpleNamespace(momentum=torch.zeros_like(p))
        p.sub_(state["held"].momentum.add_(p.grad), alpha=group["lr"])

    said = refused(step_by_function(function))

    assert "contains an object that holds tensors" in said
    assert "'held' of 'first.weight', a SimpleNamespace" in said


def test_a_step_that_records_numbers_in_a_list_of_the_optimizer_is_refused() -> None:
    class Recording(StepByFunction):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lambda p, group, state: None)
            self.rates: list[float] = []

        def step(self, closure: Any = None) -> None:
            self.rates.append(self.param_groups[0]["lr"])

    said = refused(lambda model: Recording(model.parameters()))

    assert "adds an entry to a list or dictionary" in said
    assert "'rates.0' of the optimizer" in said


def test_a_step_that_adds_a_number_to_a_dictionary_of_the_optimizer_says_how_to_create_it() -> None:
    class Recording(StepByFunction):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lambda p, group, state: None)
            self.last: dict[str, float] = {}

        def step(self, closure: Any = None) -> None:
            self.last["rate"] = self.param_groups[0]["lr"]

    said = refused(lambda model: Recording(model.parameters()))

    assert "'last.rate' of the optimizer" in said
    assert "last['key'] = 0.0" in said


class Counting:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def test_a_step_that_changes_an_object_in_a_group_is_refused() -> None:
    def counting(p: Any, group: Any, state: Any) -> None:
        p.sub_(p.grad, alpha=0.1 / group["counter"]())

    said = refused(step_by_function(counting, counter=Counting()))

    assert "changes values that are not part of the step" in said
    assert "'counter' of parameter group 0" in said


@pytest.mark.parametrize(
    "container, record",
    [
        pytest.param(list, lambda seen: seen.append("a"), id="list"),
        pytest.param(set, lambda seen: seen.add(len(seen)), id="set"),
    ],
)
def test_a_step_that_records_something_in_a_group_is_refused(container: Any, record: Any) -> None:
    def recording(p: Any, group: Any, state: Any) -> None:
        record(group["seen"])
        p.sub_(p.grad, alpha=0.1 / len(group["seen"]))

    said = refused(step_by_function(recording, seen=container()))

    assert "adds an entry to a list or dictionary" in said
    assert "'seen' of parameter group 0" in said


def with_a_transposed_weight(make: Make) -> Make:
    """Return the optimizer of a model whose first weight is not contiguous."""

    def made(model: Net) -> torch.optim.Optimizer:
        weight = model.first.weight
        weight.data = weight.data.t().contiguous().t()
        return make(model)

    return made


def scaled_by_stride(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] / p.stride()[-1])


def by_layout_of_gradient(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] * (1 if p.grad.is_contiguous() else 2))


def by_layout_of_state(p: Any, group: Any, state: Any) -> None:
    if not state:
        state["sum"] = torch.zeros_like(p)
    p.sub_(state["sum"].add_(p.grad), alpha=group["lr"] * state["sum"].stride()[0])


def in_the_order_of_memory(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"])
    torch.as_strided(size=(1,), stride=(1,), input=p).mul_(0.5)


@pytest.mark.parametrize(
    "function",
    [scaled_by_stride, by_layout_of_gradient, by_layout_of_state, in_the_order_of_memory],
)
def test_a_step_that_reads_the_layout_of_a_weight_that_is_not_contiguous_is_refused(
    function: Any,
) -> None:
    message = refused(with_a_transposed_weight(step_by_function(function)))

    assert "reads the memory layout of a weight that is not contiguous" in message
    assert "'first.weight'" in message
    assert "test_traced_step_refusals.py" in message


@pytest.mark.parametrize(
    "function",
    [scaled_by_stride, by_layout_of_gradient, by_layout_of_state, in_the_order_of_memory],
)
def test_a_step_may_read_the_layout_of_contiguous_weights(function: Any) -> None:
    pair = Pair(step_by_function(function))
    pair.steps(2)
    pair.assert_alike()


def test_weights_that_are_not_contiguous_are_trained_by_a_step_that_does_not_read_the_layout() -> (
    None
):
    pair = Pair(with_a_transposed_weight(of(T.Adafactor)))
    pair.steps(2)
    pair.assert_alike()


def with_a_weight_in_a_larger_tensor(make: Make) -> Make:
    """Return the optimizer of a model whose first weight is a part of a flat buffer."""

    def made(model: Net) -> torch.optim.Optimizer:
        weight = model.first.weight
        flat = torch.cat([torch.ones(10), weight.detach().flatten(), torch.ones(10)])
        weight.data = flat[10:-10].view(weight.shape)
        return make(model)

    return made


def scaled_by_place(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] * (1 + p.storage_offset()))


def scaled_by_place_of_part(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] / (1 + p.data[-1:].storage_offset()))


def at_the_start_of_memory(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"])
    torch.as_strided(size=(1,), stride=(1,), storage_offset=0, input=p).mul_(0.5)


READERS_OF_PLACES = [scaled_by_place, scaled_by_place_of_part, at_the_start_of_memory]


@pytest.mark.parametrize("function", READERS_OF_PLACES)
def test_a_step_that_reads_where_in_a_larger_tensor_a_weight_is_is_refused(function: Any) -> None:
    message = refused(with_a_weight_in_a_larger_tensor(step_by_function(function)))

    assert "reads the position of a weight within a larger tensor" in message
    assert "'first.weight'" in message
    assert "test_traced_step_refusals.py" in message


@pytest.mark.parametrize("function", READERS_OF_PLACES)
def test_a_step_may_read_the_place_of_weights_with_their_own_memory(function: Any) -> None:
    pair = Pair(step_by_function(function))
    pair.steps(2)
    pair.assert_alike()


def scaled_by_place_of_gradient(p: Any, group: Any, state: Any) -> None:
    p.sub_(p.grad, alpha=group["lr"] * (1 + p.grad.storage_offset()))


@pytest.mark.parametrize("make", [of(T.Adafactor), step_by_function(scaled_by_place_of_gradient)])
def test_weights_in_larger_tensors_are_trained_by_a_step_that_does_not_read_their_place(
    make: Make,
) -> None:
    pair = Pair(with_a_weight_in_a_larger_tensor(make))
    pair.steps(2)
    pair.assert_alike()


class Distinct(T.Optimizer):
    """Updates weights once, even if they are in several groups."""

    def __init__(self, params: Any, key: Callable[[torch.Tensor], int]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.key = key

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        seen = set()
        for p in (p for group in self.param_groups for p in group["params"]):
            key = self.key(p)
            if key not in seen:
                seen.add(key)
                p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(lambda p: p.data_ptr(), id="data_ptr"),
        pytest.param(lambda p: p.untyped_storage().data_ptr(), id="untyped_storage"),
        pytest.param(lambda p: p.storage().data_ptr(), id="storage"),
    ],
)
def test_a_step_that_recognises_weights_by_their_address_is_refused(address: Any) -> None:
    message = refused(lambda model: Distinct(model.parameters(), address))

    assert "reads the memory address of a tensor" in message
    assert "'first.weight'" in message
    assert "test_traced_step_refusals.py" in message


def test_a_step_may_recognise_weights_by_identity() -> None:
    pair = Pair(lambda model: Distinct(model.parameters(), id))
    pair.steps(2)
    pair.assert_alike()
