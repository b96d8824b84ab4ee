"""Functions that call custom operators, each with the function that torch has for it."""

from typing import Any

import numpy as np
import torch

import poptorch

DOMAIN = "test.ops"


def _square(inputs: list[torch.Tensor], attributes: dict[str, Any]) -> list[torch.Tensor]:
    return [torch.from_numpy(np.square(inputs[0].numpy()))]


def _square_backward(
    inputs: list[torch.Tensor],
    outputs: list[torch.Tensor],
    gradients: list[torch.Tensor],
    attributes: dict[str, Any],
) -> list[torch.Tensor]:
    assert torch.equal(outputs[0], inputs[0] ** 2)
    return [2 * inputs[0] * gradients[0]]


def _two(inputs: list[torch.Tensor], attributes: dict[str, Any]) -> list[torch.Tensor]:
    a, b = inputs
    return [a * b, (a > b).int()]


poptorch.register_custom_op("Square", DOMAIN, 1, _square, _square_backward)
poptorch.register_custom_op("Square", DOMAIN, 3, _square)
poptorch.register_custom_op("Two", DOMAIN, 1, _two, lambda i, o, g, _: [i[1] * g[0], None])
poptorch.register_custom_op(
    "Turned", DOMAIN, 1, lambda i, _: [2 * i[0].T], lambda i, o, g, _: [2 * g[0].T.contiguous()]
)
poptorch.register_custom_op("Plain", DOMAIN, 1, lambda inputs, attributes: [inputs[0].exp()])


def call(
    name: str,
    *inputs: Any,
    outputs: list[torch.Tensor] | None = None,
    attributes: Any = None,
    version: int = 1,
) -> list[torch.Tensor]:
    """Call an operator whose results are like its inputs, unless ``outputs`` says otherwise."""
    examples = inputs if outputs is None else outputs
    return poptorch.custom_op(inputs, name, DOMAIN, version, examples, attributes)


def two(x: torch.Tensor) -> torch.Tensor:
    product, larger = call("Two", x, x.detach() * 0 + 3, outputs=[x, x.long()])
    assert larger.dtype == torch.int64
    return product + larger


def turned(x: torch.Tensor) -> torch.Tensor:
    (y,) = poptorch.custom_op([x.expand(3, 2).T], "Turned", DOMAIN, 1, [x.expand(3, 2)])
    return y.sum(0, keepdim=True)


FUNCTIONS = {
    "Square": (lambda x: call("Square", x)[0], torch.square),  # by the registered gradient
    "Two": (two, lambda x: x * 3 + (x > 3).int()),  # the second result has none
    "Turned": (turned, lambda x: 6 * x),  # in memory in another order
    "Plain": (lambda x: call("Plain", x)[0], torch.exp),  # by that of what it calls
}
