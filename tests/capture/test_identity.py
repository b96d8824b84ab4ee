"""While ``forward`` is captured it sees the user's own parameters and buffers."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

import poptorch
from helpers.wrapping import Having, normal, options, training, trains_alike

X, Y = normal(8, 4), normal(8, 3, seed=1)


def model(function: Callable[..., Any], **state: Any) -> Having:
    """Return a module whose loss is computed from the result of the function."""
    torch.manual_seed(3)
    return Having(
        lambda m, x, y: nn.functional.mse_loss(function(m, x), y), layer=nn.Linear(4, 3), **state
    )


def marked(function: Callable[..., Any]) -> Having:
    """Return one that a copy follows too: attributes, lists and dictionaries of its parameters."""
    made = model(function, mark=torch.ones(3))
    made.layer.weight.gain = 3.0
    made.held = [made.layer.weight]
    return made


def parameters_are_parameters(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) * (1 if isinstance(m.layer.weight, nn.Parameter) else 5)


def the_class_is_the_users(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) * (1 if type(m.layer.weight) is nn.Parameter else 5)


def attributes_are_there(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) * m.layer.weight.gain


def dictionaries_find_parameters(m: Having, x: torch.Tensor) -> torch.Tensor:
    factors = {each: 2.0 + at for at, each in enumerate(m.parameters())}
    return m.layer(x) * factors[m.layer.weight] + factors[m.layer.bias]


def dictionaries_find_buffers(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) * dict.fromkeys(m.buffers(), 2.0)[m.mark]


def lists_hold_the_same_objects(m: Having, x: torch.Tensor) -> torch.Tensor:
    return x @ m.held[0].t() * (1 if m.held[0] is m.layer.weight else 5)


def names_lead_to_parameters(m: Having, x: torch.Tensor) -> torch.Tensor:
    return x @ m.get_parameter("layer.weight").t() + m.get_parameter("layer.bias")


def what_returns_its_argument_returns_the_parameter(m: Having, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        same = m.layer.weight.mul_(0.9) is m.layer.weight
    return m.layer(x) * (1 if same and m.layer.weight.float() is m.layer.weight else 5)


SEEN = [
    parameters_are_parameters,
    the_class_is_the_users,
    attributes_are_there,
    dictionaries_find_parameters,
    dictionaries_find_buffers,
    lists_hold_the_same_objects,
    names_lead_to_parameters,
    what_returns_its_argument_returns_the_parameter,
]


@pytest.mark.parametrize("function", SEEN, ids=lambda function: function.__name__)
def test_forward_sees_the_same_objects_as_in_eager_torch(function: Callable[..., Any]) -> None:
    trains_alike(marked(function), X, Y, eager=marked(function), accumulation=2)


class Scaling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.gain = weight.gain if isinstance(weight, nn.Parameter) else 0.0
        return x @ weight.t() * ctx.gain

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient @ weight * ctx.gain, gradient.t() @ x * ctx.gain


@torch.jit.script
def scripted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.t()


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x @ weight.t() * 2


def a_function_with_its_own_backward(m: Having, x: torch.Tensor) -> torch.Tensor:
    return Scaling.apply(x, m.held[0])


def a_scripted_function(m: Having, x: torch.Tensor) -> Any:
    return scripted(x, m.held[0])


def a_scripted_module(m: Having, x: torch.Tensor) -> Any:
    return m.held[1](x, m.held[0])


def a_functional_gradient(m: Having, x: torch.Tensor) -> torch.Tensor:
    gradient = torch.func.grad(lambda weight: (x @ weight.t()).square().mean())(m.held[0])
    return x @ (m.layer.weight - gradient).t()


def a_functional_call(m: Having, x: torch.Tensor) -> Any:
    def norm(parameters: Any) -> Any:
        return torch.func.functional_call(m.layer, parameters, (x,)).square().mean()

    parameters = dict(m.layer.named_parameters())
    gradients = torch.func.grad(norm)(parameters)
    moved = {name: parameters[name] - gradients[name] for name in parameters}
    return torch.func.functional_call(m.layer, moved, (x,))


def a_vectorized_function(m: Having, x: torch.Tensor) -> Any:
    return torch.vmap(lambda row: x @ row)(m.held[0]).t()


def a_forward_gradient(m: Having, x: torch.Tensor) -> Any:
    return sum(torch.func.jvp(lambda w: x @ w.t(), (m.held[0],), (torch.ones(3, 4),)))


def gradients_of_a_generator(m: Having, x: torch.Tensor) -> torch.Tensor:
    gradients = torch.autograd.grad(m.layer(x).square().mean(), m.layer.parameters())
    return x @ (m.layer.weight - gradients[0]).t()


def a_new_parameter(m: Having, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) + x @ nn.Parameter(m.held[0]).t()


def an_inner_checkpoint(m: Having, x: torch.Tensor) -> torch.Tensor:
    inner = checkpoint(lambda x: torch.tanh(x @ m.held[0].t()), x, use_reentrant=False)
    (gradient,) = torch.autograd.grad(inner.square().mean(), m.held[:1])
    return x @ (m.layer.weight - gradient).t()


def a_hook_in_an_inner_backward_pass(m: Having, x: torch.Tensor) -> torch.Tensor:
    hidden = m.layer(x)
    hidden.register_hook(lambda gradient: gradient * m.held[0].detach().sum())
    (gradient,) = torch.autograd.grad(hidden.square().mean(), m.held[:1])
    return x @ (m.layer.weight - gradient).t()


GIVEN = [
    a_function_with_its_own_backward,
    a_scripted_function,
    a_scripted_module,
    a_functional_gradient,
    a_functional_call,
    a_vectorized_function,
    a_forward_gradient,
    gradients_of_a_generator,
    a_new_parameter,
    an_inner_checkpoint,
    a_hook_in_an_inner_backward_pass,
]


@pytest.mark.parametrize("function", GIVEN, ids=lambda function: function.__name__)
def test_a_parameter_that_a_list_holds_is_trained_through(function: Callable[..., Any]) -> None:
    ours, eager = marked(function), marked(function)
    for each in (ours, eager):
        each.held.append(torch.jit.script(Scripted()))
    trains_alike(ours, X, Y, eager=eager, accumulation=2)


class Doubling(nn.Parameter):
    """A parameter whose layer counts twice."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type],
        args: tuple[torch.Tensor | None, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is nn.functional.linear else result


class Named(torch.Tensor):
    """A tensor whose class is also the class of results that are computed from it."""

    @property
    def doubled(self) -> Any:
        return self * 2


def linear(m: Having, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, m.weight) + m.weight.sum()


def through_the_class(m: Having, x: torch.Tensor) -> Any:
    product = x @ m.weight.t().doubled
    return product if isinstance(product, Named) else product * 5


@pytest.mark.parametrize(
    "function, make",
    [
        (linear, Doubling),
        (through_the_class, lambda value: nn.Parameter(value.as_subclass(Named))),
    ],
)
def test_the_class_of_a_parameter_is_asked_about_torchs_functions(
    function: Callable[..., Any], make: Callable[..., Any] | type
) -> None:
    ours, eager = (model(function, weight=make(normal(3, 4))) for _ in range(2))
    trains_alike(ours, X, Y, eager=eager, accumulation=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer, name",
    [(nn.RNN, "weight_ih_l0"), (nn.GRU, "weight_ih_l0"), (nn.GRU, "weight_hh_l0")],
)
def test_a_normed_recurrent_layer_iterates_as_often_as_in_eager_torch(
    layer: type[nn.RNNBase], name: str
) -> None:
    def normed() -> Having:
        made = model(lambda m, x: m.recurrent(x.unsqueeze(1))[0][:, 0])
        made.recurrent = parametrizations.spectral_norm(layer(4, 3), name)
        return made

    trains_alike(normed(), X[:2], Y[:2], eager=normed())


def without_torch_functions(m: Having, x: torch.Tensor) -> torch.Tensor:
    with torch._C.DisableTorchFunction():
        return x @ m.layer.weight.t()


def overridable(x: torch.Tensor, m: Having) -> Any:
    if has_torch_function_unary(x):
        return handle_torch_function(overridable, (x,), x, m)
    return m.layer(x)


@pytest.mark.parametrize(
    "function", [without_torch_functions, lambda m, x: overridable(x, m)], ids=["off", "overridden"]
)
def test_a_weight_that_reaches_an_operator_unseen_is_refused_with_its_line(
    function: Callable[..., Any],
) -> None:
    with pytest.raises(poptorch.Error, match=r"(?s)passes the weight itself.*test_identity\.py"):
        training(model(function))(X, Y)


def test_in_inference_a_weight_that_reaches_an_operator_unseen_is_followed() -> None:
    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            return x @ m.layer.weight.t()

    made = Having(forward, layer=nn.Linear(4, 3))
    executor = poptorch.inferenceModel(made, options())
    executor(X)
    with torch.no_grad():
        made.layer.weight.mul_(2)
    executor.copyWeightsToDevice()
    torch.testing.assert_close(executor(X), (X @ made.layer.weight.t()).detach())


def test_other_threads_compute_with_the_weights_while_forward_is_captured() -> None:
    seen = []

    def in_thread(m: Having) -> None:
        out = nn.functional.linear(X, m.layer.weight, m.held[1])
        seen.append((type(out), out.requires_grad, m.layer.weight.gain))

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=in_thread, args=[m])
        thread.start()
        thread.join()
        return m.layer(x)

    ours, eager = marked(forward), marked(forward)
    for each in (ours, eager):
        each.held.append(each.layer.bias)
    trains_alike(ours, X, Y, eager=eager)
    assert set(seen) == {(torch.Tensor, True, 3.0)}


def test_an_error_in_forward_leaves_the_parameters_as_they_were() -> None:
    def forward(m: Having, x: torch.Tensor) -> None:
        m.layer.weight.mul(2)
        raise ValueError("forward gives up")

    made = marked(forward)
    before, function = made.layer.weight, torch.autograd.Function.apply
    with pytest.raises(ValueError, match="forward gives up"):
        training(made)(X, Y)
    assert made.layer.weight is before
    assert vars(before) == {"gain": 3.0}
    assert torch.autograd.Function.apply == function


def filled(m: Having, x: torch.Tensor) -> torch.Tensor:
    if m.reference is None:
        m.reference = x.mean(0)
    return m.layer(x - m.reference)


def registered(m: Having, x: torch.Tensor) -> Any:
    if not hasattr(m, "reference"):
        m.register_buffer("reference", x.mean(0))
    return m.layer(x - m.reference)


@pytest.mark.parametrize(
    "function, known", [(filled, "was None"), (registered, "did not exist before the run")]
)
def test_a_buffer_that_forward_makes_is_refused_with_its_line(
    function: Callable[..., Any], known: str
) -> None:
    made = model(function)
    if function is filled:
        made.register_buffer("reference", None)
    with pytest.raises(poptorch.Error, match=rf"(?s)'reference' {known}.*{'x.mean'}"):
        training(made)(X, Y)
    assert getattr(made, "reference", None) is None


def test_one_buffer_under_two_names_may_not_be_parted() -> None:
    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        m.first = m.first + 1
        return m.layer(x) + m.second

    shared = torch.zeros(3)
    with pytest.raises(poptorch.Error, match="reassigned within the model"):
        training(model(forward, first=shared, second=shared))(X, Y)
