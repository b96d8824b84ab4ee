"""Running one function or module through a wrapped model and through eager torch, and comparing."""

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import poptorch
from helpers.closeness import near
from helpers.wrapping import Calling, options, training
from poptorch._ops import random_streams

SEED = 42  # the database seeds its random samples with it too
NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}
LONGEST = 800  # sum of the samples: of a row of two transformer layers, or a window of pixels
LARGEST = 81.0  # product of two numbers of the database, which are below 9
Inputs = tuple[tuple[Any, ...], dict[str, Any]]  # arguments and keyword arguments


def call_seeded(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an executor that draws what torch draws after ``manual_seed(SEED)``, in each call."""
    if not executor.isCompiled():
        executor.compile(*args, **kwargs)
    with mock.patch.object(random_streams, "seed", return_value=SEED):
        return executor(*args, **kwargs)


def loss_of(out: Any) -> torch.Tensor:
    """A scalar that every floating point output has a part in."""
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + real.float().square().sum()
    return poptorch.identity_loss(total, reduction="none")


def sizable(inputs: Any) -> bool:
    """Inputs of no elements are refused by design; such a tensor stays a constant."""
    leaves = pytree.tree_leaves(inputs)
    return all(leaf.numel() for leaf in leaves if isinstance(leaf, torch.Tensor))


class NotTried(Exception):  # noqa: N818 (not a failure)
    """Eager torch itself does not do it."""


class Trained(torch.nn.Module):
    """A module and one factor per floating point input, so that there is something to train."""

    def __init__(self, inner: torch.nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.inner = inner
        leaves = filter(is_float, pytree.tree_leaves(inputs))
        self.factors = torch.nn.ParameterList(torch.ones(()) for _ in leaves)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        factors = iter(self.factors)
        args, kwargs = pytree.tree_map(
            lambda leaf: leaf * next(factors) if is_float(leaf) else leaf, (args, kwargs)
        )
        out = self.inner(*args, **kwargs)
        return out, loss_of(out)


def is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def cloned(values: Any) -> Any:
    """Copies, as a call may change its arguments."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), values)


def check_inference(model: torch.nn.Module, inputs: Inputs, values: bool = True) -> None:
    """Compare an inference model with a plain call; without ``values`` only kinds of outputs."""
    eager = copy.deepcopy(model)
    args, kwargs = cloned(inputs)
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            expected = eager(*args, **kwargs)
    except Exception as error:
        raise NotTried from error
    executor = poptorch.inferenceModel(model, options().randomSeed(SEED))
    args, kwargs = cloned(inputs)
    got = call_seeded(executor, *args, **kwargs)
    if not values:
        got, expected = (pytree.tree_map(torch.zeros_like, out) for out in (got, expected))
    compare(got, expected)
    executor.copyWeightsToHost()
    compare(model.state_dict(), eager.state_dict(), narrow=False)


class Draws(TorchDispatchMode):
    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def check_lanes(function: Any, tensors: list[torch.Tensor]) -> None:
    """Compare two micro-batches side by side with one after the other, where nothing is drawn."""

    def one(*parts: torch.Tensor) -> list[torch.Tensor]:
        out = function(*(part.squeeze(0).clone() for part in parts))
        return [*map(torch.atleast_1d, pytree.tree_leaves(out))]

    pairs = [torch.stack([t, t * 0.75 if is_float(t) else t]) for t in tensors]
    try:
        with Draws() as draws:
            lanes = [one(*(pair[at : at + 1] for pair in pairs)) for at in range(2)]
        expected = [*map(torch.cat, zip(*lanes, strict=True))]
    except Exception as error:
        raise NotTried from error
    if draws.seen:
        raise NotTried
    opts = options(iterations=2).outputMode(poptorch.OutputMode.All)
    compare(poptorch.inferenceModel(Calling(one), opts)(*cloned(pairs)), expected, size=LARGEST)


def check_training(model: torch.nn.Module, batches: list[Inputs], lr: float) -> None:
    """Compare steps of gradient descent of a model whose last result is its loss."""
    eager, expected = copy.deepcopy(model), []
    try:
        plain = torch.optim.SGD(eager.parameters(), lr=lr)
        for args, kwargs in cloned(batches):
            torch.manual_seed(SEED)
            out = eager(*args, **kwargs)
            expected.append(cloned(out))
            plain.zero_grad()
            (out if isinstance(out, torch.Tensor) else out[-1]).backward()
            plain.step()
    except Exception as error:
        raise NotTried from error
    executor = training(model, options().randomSeed(SEED), lr)
    for (args, kwargs), out in zip(cloned(batches), expected, strict=True):
        compare(call_seeded(executor, *args, **kwargs), out)
    compare(model.state_dict(), eager.state_dict(), narrow=False)


def compare(got: Any, expected: Any, narrow: bool = True, size: float = 0.1) -> None:
    """Compare outputs of any structure; 64-bit numbers come back in 32 bits."""
    got_leaves, expected_leaves = pytree.tree_leaves(got), pytree.tree_leaves(expected)
    assert len(got_leaves) == len(expected_leaves)
    for ours, theirs in zip(got_leaves, expected_leaves, strict=True):
        if not isinstance(theirs, torch.Tensor):
            assert ours == theirs or (ours != ours and theirs != theirs)
            continue
        theirs = theirs.detach().resolve_conj().resolve_neg()
        torch.testing.assert_close(
            ours.detach(),
            (theirs.to(NARROW.get(theirs.dtype, theirs.dtype)) if narrow else theirs).contiguous(),
            equal_nan=True,
            **near(LONGEST, size=size),
            check_stride=False,
        )


def problem_of(check: Callable[..., Any]) -> str | None:
    """Run a check; return what went wrong, in one line."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            check()
    except NotTried:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def spread(items: list[Any], count: int) -> Iterator[Any]:
    """Yield at most ``count`` items, evenly spaced."""
    yield from items[:: max(1, -(-len(items) // count))]
