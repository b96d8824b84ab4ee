"""``custom_op`` and ``register_custom_op``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import poptorch
from helpers import wrapping
from helpers.custom_functions import DOMAIN, FUNCTIONS, call
from helpers.wrapping import Calling, Having, Scaled, Several, agrees, infer, options, training

X = torch.tensor([1.0, -2.0])
Tensors = list[torch.Tensor]
Attributes = dict[str, Any]

attributes_seen: list[Attributes] = []
"""Attributes of each call of the operator Remember."""


def remember(inputs: Tensors, attributes: Attributes) -> Tensors:
    """Add one, and note the attributes."""
    attributes_seen.append(attributes)
    return [tensor + 1 for tensor in inputs]


def opaque(inputs: Tensors, _: Attributes) -> Tensors:
    """Double by NumPy, which has no gradient."""
    return [torch.from_numpy(inputs[0].numpy() * 2)]


poptorch.register_custom_op("Remember", DOMAIN, 1, remember)
poptorch.register_custom_op("Opaque", DOMAIN, 1, opaque)
poptorch.register_custom_op("Five", DOMAIN, 1, lambda inputs, attributes: [torch.full((2,), 5.0)])
torch.library.define("test_ops::NoGradient", "(Tensor x) -> Tensor")
torch.library.impl("test_ops::NoGradient", "CPU", lambda x: torch.from_numpy(x.numpy() * 2))


@torch.library.custom_op("test_ops::NoFormula", mutates_args=())
def no_formula(x: torch.Tensor) -> torch.Tensor:
    """Double, without a formula for the gradient."""
    return x * 2


no_formula.register_fake(torch.empty_like)


def square(x: torch.Tensor) -> Tensors:
    return poptorch.custom_op((x,), "Square", DOMAIN, 1, example_outputs=[x])


# Results.


@pytest.mark.spec("ops", 14)
def test_an_operator_returns_a_list() -> None:
    def forward(x: torch.Tensor) -> Tensors:
        out = square(x)
        assert type(out) is list
        return out

    (out,) = agrees(forward, X)

    assert out.tolist() == [1.0, 4.0]


@pytest.mark.spec("ops", 14)
def test_an_operator_leaves_its_examples_alone() -> None:
    def forward(x: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return square(x), x

    _, x = agrees(forward, X.clone())

    assert torch.equal(x, X)


def test_an_operator_may_have_no_inputs() -> None:
    def forward(x: torch.Tensor) -> Tensors:
        return poptorch.custom_op([], "Five", DOMAIN, 1, [torch.empty(2)])

    (five,) = agrees(forward, X)

    assert five.tolist() == [5.0, 5.0]


def call_in_a_model(name: str, x: torch.Tensor, **settings: Any) -> Tensors:
    return infer(lambda x: call(name, x, **settings), x)


in_and_outside_of_models = pytest.mark.parametrize(
    "calling", [call, call_in_a_model], ids=["outside of models", "in a model"]
)


@in_and_outside_of_models
@pytest.mark.parametrize(
    "name, outputs",
    [
        pytest.param("Square", [X, X], id="one more"),
        pytest.param("Square", [X[:1]], id="another shape"),
        pytest.param("Square", [X.int()], id="another type"),
        pytest.param("NoFormula", [X[:1]], id="another shape, of torch's registry"),
    ],
)
def test_results_unlike_their_examples_are_an_error(
    name: str, outputs: Tensors, calling: Callable[..., Tensors]
) -> None:
    with pytest.raises(poptorch.Error, match="do not match its example outputs"):
        calling(name, X, outputs=outputs)


def test_an_example_with_64_bits_matches_a_result_with_32_bits() -> None:
    (out,) = infer(lambda x: call("Square", x, outputs=[x.double()]), X)

    assert out.dtype == torch.float32
    assert out.tolist() == [1.0, 4.0]


# Gradients.


def test_gradients_are_registered_or_those_of_the_called_operators() -> None:
    weights = [torch.tensor([1.5, 0.5])] * len(FUNCTIONS)
    inputs = [torch.tensor([[1.0, -2.0], [3.0, 0.5]])] * len(FUNCTIONS)
    custom = Several([custom for custom, _ in FUNCTIONS.values()], weights)
    plain = Several([plain for _, plain in FUNCTIONS.values()], weights)

    wrapping.trains_alike(custom, *inputs, eager=plain, accumulation=2, lr=1e-3)


without_gradient = pytest.mark.parametrize("name", ["NoGradient", "NoFormula", "Opaque"])


@without_gradient
def test_an_operator_without_a_gradient_can_be_used_in_inference(name: str) -> None:
    assert infer(lambda x: call(name, x)[0], X).tolist() == [2.0, -4.0]


@without_gradient
def test_an_operator_without_a_gradient_is_an_error_in_training(name: str) -> None:
    model = training(Scaled(lambda x: call(name, x)[0]), options(accumulation=2))

    with pytest.raises(poptorch.Error, match="has no gradient"):
        model.compile(torch.stack([X, X]))


@without_gradient
def test_an_operator_without_a_gradient_can_be_used_in_training_on_detached_tensors(
    name: str,
) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return call(name, x.detach())[0] * x

    model = training(Scaled(function), options(accumulation=2))
    before = model.model.weight.item()

    model(torch.stack([X, X]))

    assert model.model.weight.item() != before


@pytest.fixture
def paired_operators() -> torch.library.Library:
    """An operator Scaled and its gradient ScaledGrad.

    ``<name>Grad`` takes inputs and the outputs' gradients, and returns those of the inputs.
    """
    library = torch.library.Library("paired_ops", "DEF")
    library.define("Scaled(Tensor x, Tensor y, float by) -> Tensor")
    library.define("ScaledGrad(Tensor x, Tensor y, Tensor gradient, float by) -> Tensor[]")
    library.impl("Scaled", lambda x, y, by: x * y * by, "CPU")
    library.impl("ScaledGrad", lambda x, y, g, by: [g * y * by, (g * x * by).sum(0)], "CPU")
    return library


@pytest.mark.usefixtures("paired_operators")
def test_a_gradient_is_found_by_name() -> None:
    def model(product: Any) -> Having:
        def forward(model: Having, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(product(x * model.first, model.second), "sum")

        first, second = (torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
        return Having(forward, first=first, second=second)

    def custom(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return poptorch.custom_op([x, y], "Scaled", "paired.ops", 1, [x], {"by": 0.5})[0]

    plain = model(lambda x, y: x * y * 0.5)

    wrapping.trains_alike(model(custom), torch.randn(3, 2), eager=plain, accumulation=3)


# Attributes.

GIVEN: Attributes = {"numbers": [1, 2], "flag": True, "name": "n"}


@pytest.fixture
def remembering() -> poptorch.PoplarExecutor:
    """A model that calls Remember four times, after it was run once."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        (a,) = call("Remember", x, attributes=GIVEN)
        (b,) = call("Remember", a, attributes={"numbers": [1.0, 2.0]})
        (c,) = call("Remember", b, attributes={})
        return call("Remember", c)[0]

    attributes_seen.clear()
    model = poptorch.inferenceModel(Calling(forward), wrapping.unchecked())
    assert model(torch.zeros(1)) == 4
    return model


def calls_in_graph(model: poptorch.PoplarExecutor) -> list[torch.fx.Node]:
    return [node for node in wrapping.graph_of(model).nodes if "custom_op" in str(node.target)]


@pytest.mark.spec("ops", 15)
@pytest.mark.usefixtures("remembering")
def test_attributes_that_look_equal_in_python_are_different() -> None:
    expected = [dict(sorted(GIVEN.items())), {"numbers": [1.0, 2.0]}, {}, {}]

    assert repr(attributes_seen) == repr(expected)  # 1 == 1.0 in Python


def test_equal_calls_are_not_merged(remembering: poptorch.PoplarExecutor) -> None:
    assert len(calls_in_graph(remembering)) == 4


@pytest.mark.spec("ops", 16)
def test_attributes_can_be_looked_up(remembering: poptorch.PoplarExecutor) -> None:
    first, *_ = calls_in_graph(remembering)

    assert poptorch.accessAttributes(first.args[2]) == GIVEN


@pytest.mark.spec("ops", 16)
def test_unknown_attributes_are_none() -> None:
    assert poptorch.accessAttributes("attr:0x0") == {}


def test_attributes_may_have_the_largest_numbers_of_their_types() -> None:
    largest = {"f": [3.4028234e38, -3.4028234e38], "i": [2**63 - 1, -(2**63)]}

    call("Remember", X, attributes=largest)

    assert attributes_seen[-1] == largest


# Unknown operators.


@in_and_outside_of_models
def test_an_unknown_operator_is_an_error_that_says_how_to_register_it(
    calling: Callable[..., Tensors],
) -> None:
    message = r"(?s)'Missing' in domain 'test\.ops'.*torch\.ops\.test_ops\.Missing"

    with pytest.raises(poptorch.Error, match=message):
        calling("Missing", X)


def test_an_unknown_version_is_an_error_that_says_which_there_are() -> None:
    with pytest.raises(poptorch.Error, match="it is registered in version 1, 3"):
        call("Square", X, version=2)
