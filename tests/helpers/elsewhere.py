"""A device that is no CPU to torch, and the reference tier on it; run as a program it checks both.

Its tensors hold tensors of the host where no operator of torch sees them: one that mixes them with
others fails. It counts what travels.
"""

import collections
import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import poptorch
from helpers.closeness import near
from helpers.wrapping import Calling, EagerPair, Graded, options
from poptorch._ir import backend_names
from poptorch.backends.reference import Reference
from poptorch.testing import check_backend

NAME = "elsewhere"
aten = torch.ops.aten
# What torch would put together from others, with tensors of its own.
WHOLE = ["alias", "contiguous", "detach", "mse_loss", "reshape", "_unsafe_view"]
copies: collections.Counter[tuple[str, str]] = collections.Counter()  # by the devices' types


def inside(value: Any) -> Any:
    return value.inside if value.device.type == NAME else value


def outside(value: torch.Tensor) -> torch.Tensor:
    made = torch._C._acc.create_empty_tensor(tuple(value.shape), value.dtype)
    made.inside = value
    return made


def run(operator: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = {}

    def enter(value: torch.Tensor) -> torch.Tensor:
        assert value.device.type == NAME or not value.dim(), f"{operator} of tensors on the host"
        given[id(inside(value))] = value
        return inside(value)

    args, kwargs = tree_map_only(torch.Tensor, enter, (args, kwargs))
    args, kwargs = tree_map_only(torch.device, lambda _: torch.device("cpu"), (args, kwargs))
    results = operator(*args, **kwargs)
    return tree_map_only(
        torch.Tensor, lambda each: given[id(each)] if id(each) in given else outside(each), results
    )


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> Any:
    copies[source.device.type, target.device.type] += 1
    inside(target).copy_(inside(source))
    return target


def convolution_backward(gradient: torch.Tensor, *rest: Any) -> Any:
    x, weight, *others = rest
    return run(aten.convolution_backward.default, gradient, x, weight, [gradient.shape[1]], *others)


class Elsewhere(Reference):
    name = NAME


def check_copies() -> None:
    """Weights are copied once. Later calls copy inputs and results only, until weights are read."""
    pair = EagerPair(
        Graded(fc=torch.nn.Linear(4, 3, bias=False), norm=torch.nn.BatchNorm1d(3)),
        functools.partial(torch.optim.Adam, lr=0.05),
        options(NAME),
        **near(16, 8),
    )
    inputs = torch.randn(8, 4), torch.randn(8, 3)
    up, down = ("cpu", NAME), (NAME, "cpu")
    state = len(pair.model.state_dict())
    pair.step(*inputs)
    assert copies[up] >= state
    copies.clear()
    pair.step(*inputs, count=3)
    assert copies[up] == 3 * len(inputs), copies
    assert copies[down] == 3, copies
    pair.compare()
    assert copies[down] >= 3 + state
    pair.wrapped.detachFromDevice()
    pair.step(*inputs)
    pair.compare()
    changed = torch.zeros(2, 3)
    poptorch.inferenceModel(Calling(lambda x: x.add_(1)), options(NAME))(changed)
    assert torch.equal(changed, torch.ones(2, 3))


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    all_of_them, torchs = (torch.library.Library(name, "IMPL") for name in ("_", "aten"))
    all_of_them.fallback(run, "PrivateUse1")
    kernels = {name: functools.partial(run, getattr(aten, name).default) for name in WHOLE}
    kernels["convolution_overrideable"] = functools.partial(run, aten.convolution.default)
    kernels["convolution_backward_overrideable"] = convolution_backward
    kernels["_copy_from"] = copy_from
    for name, kernel in kernels.items():
        torchs.impl(name, kernel, "PrivateUse1")
    Elsewhere.device = torch.device(NAME)
    points = EntryPoints([EntryPoint(NAME, f"{__name__}:Elsewhere", "poptorch.backends")])
    backend_names.others = lambda: points
    check_backend(NAME)
    check_copies()


if __name__ == "__main__":
    main()
