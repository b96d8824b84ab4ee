"""``custom_op`` and ``register_custom_op``."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import poptorch
from helpers.wrapping import Calling, Scaled, graph_of, infer, options, training

DOMAIN = "test.ops"
seen: list[dict] = []


def remember(inputs, attributes):
    seen.append(attributes)
    return [tensor + 1 for tensor in inputs]


def square(inputs, attributes):
    return [torch.from_numpy(np.square(inputs[0].numpy()))]


def square_backward(inputs, outputs, gradients, attributes):
    assert torch.equal(outputs[0], inputs[0] ** 2)
    return [2 * inputs[0] * gradients[0]]


def opaque(inputs, attributes):
    return [torch.from_numpy(inputs[0].numpy().copy())]


def two_outputs(inputs, attributes):
    a, b = inputs
    return [a * b, (a > b).int()]


def two_backward(inputs, outputs, gradients, attributes):
    return [inputs[1] * gradients[0], None]


poptorch.register_custom_op("Remember", DOMAIN, 1, remember)
poptorch.register_custom_op("Square", DOMAIN, 1, square, square_backward)
poptorch.register_custom_op("Square", DOMAIN, 3, square)
poptorch.register_custom_op("Opaque", DOMAIN, 1, opaque)
poptorch.register_custom_op("Two", DOMAIN, 1, two_outputs, two_backward)
poptorch.register_custom_op(
    "Turned", DOMAIN, 1, lambda i, _: [2 * i[0].T], lambda i, o, g, _: [2 * g[0].T.contiguous()]
)
poptorch.register_custom_op("Plain", DOMAIN, 1, lambda inputs, attributes: [inputs[0].exp()])
poptorch.register_custom_op("Five", DOMAIN, 1, lambda inputs, attributes: [torch.full((2,), 5.0)])

torch.library.define("test_ops::NoGradient", "(Tensor x) -> Tensor")
torch.library.impl("test_ops::NoGradient", "CPU", lambda x: torch.from_numpy(x.numpy() * 2))


@torch.library.custom_op("test_ops::NoFormula", mutates_args=())
def no_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@no_formula.register_fake
def _(x):
    return torch.empty_like(x)


def call(name: str, *inputs: torch.Tensor, outputs=None, attributes=None, version: int = 1):
    examples = inputs if outputs is None else outputs
    return poptorch.custom_op(inputs, name, DOMAIN, version, examples, attributes)


X = torch.tensor([1.0, -2.0])


@pytest.mark.spec("ops", 14)
def test_it_returns_a_list_and_leaves_its_examples_alone() -> None:
    def forward(x):
        out = poptorch.custom_op((x,), "Square", DOMAIN, 1, example_outputs=[x])
        assert type(out) is list
        return out, x

    for (out,), x in (infer(forward, X.clone()), forward(X.clone())):
        assert out.tolist() == [1.0, 4.0]
        assert torch.equal(x, X)


def test_training_uses_the_registered_gradient() -> None:
    model = training(Scaled(lambda x: call("Square", x)[0]))
    out, loss = model(X)
    assert out.tolist() == [4.0, 16.0]
    # loss = mean((w x)^4), its derivative in w is mean(4 w^3 x^4)
    assert loss.item() == pytest.approx((16 + 256) / 2)
    assert model.model.weight.item() == pytest.approx(2 - 0.1 * (4 * 8 * (1 + 16) / 2))


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_several_outputs_and_inputs_without_gradient(backend: str) -> None:
    b = torch.tensor([3.0, -5.0])

    def forward(x, b):
        product, larger = call("Two", x, b, outputs=[x, x.long()])
        assert larger.dtype == torch.int64
        return product + larger

    model = training(Scaled(forward), options(backend))
    out, _ = model(X, b)
    assert out.tolist() == [6.0, 21.0]  # 2x = (2, -4); 2x * b = (6, 20); 2x > b = (0, 1)
    assert model.model.weight.item() == pytest.approx(2 - 0.1 * (6 * 3 + 21 * 10))


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_results_and_gradients_may_lie_in_memory_in_any_order(backend: str) -> None:
    def forward(x):
        (y,) = poptorch.custom_op([x.T], "Turned", DOMAIN, 1, example_outputs=[x])
        return y

    net, x = Scaled(forward), torch.randn(3, 4)
    y, loss = training(net, options(backend))(x)
    torch.testing.assert_close(y, 4 * x)
    torch.testing.assert_close(loss, y.square().mean())
    torch.testing.assert_close(net.weight.detach(), 2 - 0.1 * (y * 4 * x).mean())


def test_without_a_gradient_forward_itself_is_differentiated() -> None:
    model = training(Scaled(lambda x: call("Plain", x)[0]))
    model(X)
    weight = torch.tensor(2.0, requires_grad=True)
    (weight * X).exp().square().mean().backward()
    assert model.model.weight.item() == pytest.approx((2 - 0.1 * weight.grad).item())


@pytest.mark.parametrize("name", ["NoGradient", "NoFormula"])
def test_a_missing_gradient_is_an_error_in_training_only(name: str) -> None:
    assert infer(lambda x: call(name, x)[0], X).tolist() == [2.0, -4.0]
    with pytest.raises(poptorch.Error, match="has no gradient"):
        training(Scaled(lambda x: call(name, x)[0])).compile(X)
    detached = training(Scaled(lambda x: call(name, x.detach())[0] * x))
    detached(X)
    assert detached.model.weight != 2.0


def test_what_cannot_be_differentiated_needs_a_gradient() -> None:
    assert infer(lambda x: call("Opaque", x)[0], X).tolist() == X.tolist()
    with pytest.raises(poptorch.Error, match="has no gradient"):
        training(Scaled(lambda x: call("Opaque", x)[0])).compile(X)


def test_one_node_per_call_in_the_graph() -> None:
    model = poptorch.inferenceModel(Calling(lambda x: call("Square", x)[0]), options())
    model(X)
    targets = [node.target for node in graph_of(model).nodes]
    assert targets.count(torch.ops.poptorch.custom_op.default) == 1


def test_micro_batches_side_by_side_compute_the_same() -> None:
    model = training(Scaled(lambda x: call("Square", x)[0]), options(accumulation=2))
    model(X)
    expected = 2 - 0.1 * sum(4 * 8 * x**4 for x in (1.0, 2.0)) / 2
    assert model.model.weight.item() == pytest.approx(expected)


def test_generators_have_no_inputs() -> None:
    (five,) = infer(
        lambda x: poptorch.custom_op([], "Five", DOMAIN, 1, [torch.empty(2)]), torch.ones(1)
    )
    assert five.tolist() == [5.0, 5.0]


@pytest.mark.spec("ops", 15)
def test_attributes_that_look_equal_in_python_are_different() -> None:
    def forward(x):
        (a,) = call("Remember", x, attributes={"numbers": [1, 2], "flag": True, "name": "n"})
        (b,) = call("Remember", a, attributes={"numbers": [1.0, 2.0]})
        (c,) = call("Remember", b, attributes={})
        return call("Remember", c)[0]

    seen.clear()
    given = {"numbers": [1, 2], "flag": True, "name": "n"}
    assert infer(forward, torch.zeros(1)) == 4
    assert repr(seen) == repr([dict(sorted(given.items())), {"numbers": [1.0, 2.0]}, {}, {}])


@pytest.mark.spec("ops", 16)
@pytest.mark.parametrize(
    "attributes, error, phrase",
    [
        ({1: 2.0}, ValueError, "All attribute keys must be strings"),
        ({"a": None}, ValueError, "Attribute values must be"),
        ({"a": [[1]]}, ValueError, "Attribute values must be"),
        ({"a": [1, 2.0]}, ValueError, "must all be the same"),
        ({"ä": 1}, ValueError, "contains non-ASCII characters"),
        ({"a": "ä"}, ValueError, "contains non-ASCII characters"),
        ({"a": ["a", "ä"]}, ValueError, "contains non-ASCII characters"),
        ({"a": 1e39}, poptorch.Error, "is too high for a Popart float attribute"),
        ({"a": [-1e39]}, poptorch.Error, "is too low for a Popart float attribute"),
        ({"a": 2**63}, poptorch.Error, "is too high"),
    ],
)
def test_attributes_are_checked(attributes: dict, error: type, phrase: str) -> None:
    with pytest.raises(error, match=phrase):
        infer(lambda x: call("Remember", x, attributes=attributes), X)


@pytest.mark.spec("ops", 16)
def test_attributes_at_the_edge_of_their_range_pass() -> None:
    seen.clear()
    edge = {"f": [3.4028234e38, -3.4028234e38], "i": [2**63 - 1, -(2**63)]}
    call("Remember", X, attributes=edge)
    assert seen == [edge]


def test_unknown_operators_say_how_to_register_them() -> None:
    for forward in (lambda x: call("Missing", x), lambda x: infer(lambda x: call("Missing", x), x)):
        with pytest.raises(poptorch.Error, match=r"'Missing' in domain 'test\.ops'") as caught:
            forward(X)
        assert "torch.ops.test_ops.Missing" in str(caught.value)
    with pytest.raises(poptorch.Error, match="it is registered in version 1, 3"):
        call("Square", X, version=2)


@pytest.mark.parametrize(
    "outputs",
    [[], [X, X], [X[:1]], [X.int()]],
    ids=["too few", "too many", "another shape", "another dtype"],
)
@pytest.mark.parametrize("name", ["Square", "NoFormula"])
def test_wrong_examples_are_an_error(name: str, outputs: list) -> None:
    phrase = "something else than its example outputs"
    with pytest.raises(poptorch.Error, match=phrase):
        call(name, X, outputs=outputs)
    if outputs:  # without results there is nothing to run
        with pytest.raises(poptorch.Error, match=phrase):
            infer(lambda x: call(name, x, outputs=outputs), X)


def test_64_bit_examples_stand_for_32_bit_results() -> None:
    (out,) = infer(lambda x: call("Square", x, outputs=[x.double()]), X)
    assert out.dtype == torch.float32
    assert out.tolist() == [1.0, 4.0]


def test_registering_wants_functions_and_tensors() -> None:
    with pytest.raises(poptorch.Error, match="needs functions"):
        poptorch.register_custom_op("X", DOMAIN, 1, "forward")
    with pytest.raises(poptorch.Error, match=r"must take torch\.tensor inputs"):
        poptorch.custom_op([1.0], "Square", DOMAIN, 1, [X])
    poptorch.register_custom_op("Again", DOMAIN, 1, lambda inputs, attributes: [inputs[0] * 0])
    poptorch.register_custom_op("Again", DOMAIN, 1, lambda inputs, attributes: [inputs[0] * 3])
    assert call("Again", X)[0].tolist() == [3.0, -6.0]


def test_attributes_are_found_by_what_an_operator_carries() -> None:
    attributes = {"numbers": [1, 2], "alpha": 0.5, "name": "n"}
    model = poptorch.inferenceModel(
        Calling(lambda x: call("Remember", x, attributes=attributes)), options()
    )
    model(X)
    (node,) = (n for n in graph_of(model).nodes if "custom_op" in str(n.target))
    assert poptorch.accessAttributes(node.args[2]) == attributes
    assert poptorch.accessAttributes("attr:0x0") == {}
    with pytest.raises(ValueError, match="Wrong type"):
        poptorch.accessAttributes(3)
    for wrong in ("", "attr:0x7f", "3", "[1]"):
        with pytest.raises(ValueError, match="Invalid attribute_id_str"):
            poptorch.accessAttributes(wrong)


def test_a_gradient_is_found_by_name() -> None:
    """``<name>Grad`` takes inputs and the outputs' gradients, and returns those of the inputs."""
    library = torch.library.Library("paired_ops", "DEF")
    library.define("Scaled(Tensor x, Tensor y, float by) -> Tensor")
    library.define("ScaledGrad(Tensor x, Tensor y, Tensor gradient, float by) -> Tensor[]")
    library.impl("Scaled", lambda x, y, by: x * y * by, "CPU")
    library.impl("ScaledGrad", lambda x, y, g, by: [g * y * by, (g * x * by).sum(0)], "CPU")

    class Model(torch.nn.Module):
        def __init__(self, ours: bool) -> None:
            super().__init__()
            self.ours = ours
            self.first, self.second = (
                torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.first
            if not self.ours:
                return poptorch.identity_loss(x * self.second * 0.5, "sum")
            (out,) = poptorch.custom_op(
                [x, self.second], "Scaled", "paired.ops", 1, [x], {"by": 0.5}
            )
            return poptorch.identity_loss(out, "sum")

    models = [Model(True), Model(False)]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = poptorch.trainingModel(model, options(), optimizer)
        for value in (1.0, 2.0):
            step(torch.full((3, 2), value))
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())
    del library
