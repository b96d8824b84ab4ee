"""``custom_op`` and ``register_custom_op``."""

import pytest
import torch

import poptorch
from helpers import wrapping
from helpers.custom_functions import DOMAIN, FUNCTIONS, call
from helpers.wrapping import Having, Scaled, Several, agrees, infer, options, training

seen: list[dict] = []
X = torch.tensor([1.0, -2.0])


def remember(inputs, attributes):
    seen.append(attributes)
    return [tensor + 1 for tensor in inputs]


poptorch.register_custom_op("Remember", DOMAIN, 1, remember)
poptorch.register_custom_op("Opaque", DOMAIN, 1, lambda i, _: [torch.from_numpy(i[0].numpy() * 2)])
poptorch.register_custom_op("Five", DOMAIN, 1, lambda inputs, attributes: [torch.full((2,), 5.0)])
torch.library.define("test_ops::NoGradient", "(Tensor x) -> Tensor")
torch.library.impl("test_ops::NoGradient", "CPU", lambda x: torch.from_numpy(x.numpy() * 2))


@torch.library.custom_op("test_ops::NoFormula", mutates_args=())
def no_formula(x: torch.Tensor) -> torch.Tensor:
    return x * 2


no_formula.register_fake(torch.empty_like)


@pytest.mark.spec("ops", 14)
def test_it_returns_a_list_and_leaves_its_examples_alone() -> None:
    def forward(x):
        out = poptorch.custom_op((x,), "Square", DOMAIN, 1, example_outputs=[x])
        assert type(out) is list
        return out, x, poptorch.custom_op([], "Five", DOMAIN, 1, [torch.empty(2)])

    (out,), x, (five,) = agrees(forward, X.clone())
    assert out.tolist() == [1.0, 4.0]
    assert torch.equal(x, X)
    assert five.tolist() == [5.0, 5.0]


def test_gradients_are_the_registered_ones_or_those_of_what_is_called() -> None:
    weights = [torch.tensor([1.5, 0.5])] * len(FUNCTIONS)
    known, plain = (Several([f[at] for f in FUNCTIONS.values()], weights) for at in (0, 1))
    inputs = [torch.tensor([[1.0, -2.0], [3.0, 0.5]])] * len(FUNCTIONS)
    wrapping.trains_alike(known, *inputs, eager=plain, accumulation=2, lr=1e-3)


@pytest.mark.parametrize("name", ["NoGradient", "NoFormula", "Opaque"])
def test_a_missing_gradient_is_an_error_in_training_only(name: str) -> None:
    opts, x = options(accumulation=2), torch.stack([X, X])
    assert infer(lambda x: call(name, x)[0], X).tolist() == [2.0, -4.0]
    with pytest.raises(poptorch.Error, match="has no gradient"):
        training(Scaled(lambda x: call(name, x)[0]), opts).compile(x)
    detached = training(Scaled(lambda x: call(name, x.detach())[0] * x), opts)
    detached(x)
    assert detached.model.weight != 2.0


@pytest.mark.spec("ops", 15, 16)
def test_attributes_that_look_equal_in_python_are_different() -> None:
    given = {"numbers": [1, 2], "flag": True, "name": "n"}

    def forward(x):
        (a,) = call("Remember", x, attributes=given)
        (b,) = call("Remember", a, attributes={"numbers": [1.0, 2.0]})
        (c,) = call("Remember", b, attributes={})
        return call("Remember", c)[0]

    seen.clear()
    model = poptorch.inferenceModel(wrapping.Calling(forward), wrapping.unchecked())
    assert model(torch.zeros(1)) == 4
    assert repr(seen) == repr([dict(sorted(given.items())), {"numbers": [1.0, 2.0]}, {}, {}])
    nodes = [n for n in wrapping.graph_of(model).nodes if "custom_op" in str(n.target)]
    assert len(nodes) == 4  # one for each call
    assert poptorch.accessAttributes(nodes[0].args[2]) == given
    assert poptorch.accessAttributes("attr:0x0") == {}
    edge = {"f": [3.4028234e38, -3.4028234e38], "i": [2**63 - 1, -(2**63)]}
    call("Remember", X, attributes=edge)
    assert seen[-1] == edge


def test_unknown_operators_say_how_to_register_them() -> None:
    for forward in (lambda x: call("Missing", x), lambda x: infer(lambda x: call("Missing", x), x)):
        said = r"(?s)'Missing' in domain 'test\.ops'.*torch\.ops\.test_ops\.Missing"
        with pytest.raises(poptorch.Error, match=said):
            forward(X)
    with pytest.raises(poptorch.Error, match="it is registered in version 1, 3"):
        call("Square", X, version=2)


@pytest.mark.parametrize("name, outputs", [
    ("Square", [X, X]), ("Square", [X[:1]]), ("Square", [X.int()]), ("NoFormula", [X[:1]]),
])  # fmt: skip
def test_wrong_examples_are_an_error(name: str, outputs: list) -> None:
    for calling in (call, lambda *_, outputs: infer(lambda x: call(name, x, outputs=outputs), X)):
        with pytest.raises(poptorch.Error, match="something else than its example outputs"):
            calling(name, X, outputs=outputs)
    (out,) = infer(lambda x: call("Square", x, outputs=[x.double()]), X)  # of 64 bits: for 32
    assert (out.dtype, out.tolist()) == (torch.float32, [1.0, 4.0])


def test_a_gradient_is_found_by_name() -> None:
    """``<name>Grad`` takes inputs and the outputs' gradients, and returns those of the inputs."""
    library = torch.library.Library("paired_ops", "DEF")
    library.define("Scaled(Tensor x, Tensor y, float by) -> Tensor")
    library.define("ScaledGrad(Tensor x, Tensor y, Tensor gradient, float by) -> Tensor[]")
    library.impl("Scaled", lambda x, y, by: x * y * by, "CPU")
    library.impl("ScaledGrad", lambda x, y, g, by: [g * y * by, (g * x * by).sum(0)], "CPU")

    def model(product) -> Having:
        def forward(model, x):
            return poptorch.identity_loss(product(x * model.first, model.second), "sum")

        first, second = (torch.nn.Parameter(torch.tensor([1.0, 2.0])) for _ in range(2))
        return Having(forward, first=first, second=second)

    def ours(x, y):
        return poptorch.custom_op([x, y], "Scaled", "paired.ops", 1, [x], {"by": 0.5})[0]

    plain = model(lambda x, y: x * y * 0.5)
    wrapping.trains_alike(model(ours), torch.randn(3, 2), eager=plain, accumulation=3)
    del library
