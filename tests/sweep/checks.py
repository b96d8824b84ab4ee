"""Running one function or module through a wrapped model and through eager torch, and comparing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils import _pytree as pytree

import poptorch
from poptorch._ops import streams

SEED = 42  # the database seeds its random samples with it too
NARROW = {torch.int64: torch.int32, torch.float64: torch.float32}


def options() -> poptorch.Options:
    """The reference backend, one micro-batch per call, a fixed seed."""
    opts = poptorch.Options().backend("reference").randomSeed(SEED)
    return opts.showCompilationProgressBar(False)


def call_seeded(executor: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an executor that draws what torch draws after ``manual_seed(SEED)``, in each call."""
    if not executor.isCompiled():
        executor.compile(*args, **kwargs)
    with mock.patch.object(streams, "seed", return_value=SEED):
        return executor(*args, **kwargs)


class Applied(nn.Module):
    """A function of tensors some of which are parameters, and the sum of its outputs' squares.

    Args:
        function: of all the tensors, in order.
        tensors: examples; those of ``trained`` become parameters.
        trained: places of the parameters.
        given: places of the inputs of forward; the rest are constants.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: list[torch.Tensor],
        trained: list[int],
        given: list[int],
    ) -> None:
        super().__init__()
        self.function, self.given, self.trained = function, given, trained
        self.kept = [None if i in (*trained, *given) else t for i, t in enumerate(tensors)]
        values = [nn.Parameter(tensors[at].detach().clone()) for at in trained]
        self.weights = nn.ParameterList(values)

    def forward(self, *inputs):
        tensors = list(self.kept)
        for at, value in zip(self.given, inputs, strict=True):
            tensors[at] = value
        for at, value in zip(self.trained, self.weights, strict=True):
            tensors[at] = value
        out = self.function(*tensors)
        return (out, loss_of(out)) if self.trained else out


def loss_of(out: Any) -> torch.Tensor:
    """A scalar that every floating point output has a part in."""
    total = torch.zeros(())
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            real = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
            total = total + real.float().square().sum()
    return poptorch.identity_loss(total, reduction="none")


def sizable(tensor: torch.Tensor) -> bool:
    """Inputs of no elements are refused by design; such a tensor stays a constant."""
    return tensor.numel() > 0


def check_inference(
    function: Callable[..., Any], tensors: list[torch.Tensor], values: bool = True
) -> None:
    """Compare an inference model with a plain call; without ``values`` only kinds of outputs.

    Raises:
        NotTried: eager torch refuses.
    """
    given = [at for at, tensor in enumerate(tensors) if sizable(tensor)]
    model = Applied(function, tensors, [], given)
    inputs = [tensors[at].detach().clone() for at in given]
    torch.manual_seed(SEED)
    try:
        with torch.no_grad():
            expected = model(*(t.clone() for t in inputs))
    except Exception as error:
        raise NotTried from error
    got = call_seeded(poptorch.inferenceModel(model, options()), *inputs)
    if not values:
        got, expected = (pytree.tree_map(torch.zeros_like, out) for out in (got, expected))
    compare(got, expected)


class NotTried(Exception):  # noqa: N818 (not a failure)
    """Eager torch itself does not do it."""


def check_training(function: Callable[..., Any], tensors: list[torch.Tensor]) -> None:
    """Compare one step of gradient descent.

    Raises:
        NotTried: eager torch finds nothing to train, or refuses.
    """
    trained = [at for at, t in enumerate(tensors) if t.dtype == torch.float32 and sizable(t)]
    given = [at for at, t in enumerate(tensors) if sizable(t) and at not in trained]
    model = Applied(function, tensors, trained, given)
    eager = copy.deepcopy(model)
    inputs = [tensors[at].detach().clone() for at in given]
    torch.manual_seed(SEED)
    try:
        out, loss = eager(*(t.clone() for t in inputs))
        out = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone(), out)
        loss.backward()
    except Exception as error:
        raise NotTried from error
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    wrapped = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    got, got_loss = call_seeded(wrapped, *inputs)
    compare(got, out)
    compare(got_loss, loss)
    compare(list(model.weights), list(eager.weights))


def compare(got: Any, expected: Any, narrow: bool = True) -> None:
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
            rtol=1e-4,
            atol=1e-5,
            check_stride=False,
        )


def problem_of(check: Callable[[], Any]) -> str | None:
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
    step = max(1, -(-len(items) // count))
    yield from items[::step]
