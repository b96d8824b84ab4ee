"""Compiled parts of forward, and torch's older checkpoints: trained as the plain model is."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Distribution
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from helpers.wrapping import Having, normal, options, training, trains_alike
from poptorch._base import private

X, Y = normal(8, 4), normal(8, 3, seed=1)
by_checkpoint = functools.partial(checkpoint, use_reentrant=False)


@pytest.fixture(autouse=True)
def validating() -> Iterator[None]:
    """Compiling anything ends the validation of all distributions' arguments."""
    before = Distribution._validate_args
    yield
    Distribution.set_default_validate_args(before)


def net(calling: Callable[..., Any] = lambda block, x: block(x)) -> Having:
    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = m.last(calling(m.block, x))
        return out, nn.functional.mse_loss(out, y)

    torch.manual_seed(4)
    return Having(forward, block=nn.Sequential(nn.Linear(4, 4), nn.Tanh()), last=nn.Linear(4, 3))


def compiled_parts() -> nn.Module:
    """Compile one part in place, and replace the other one by its compiled form."""
    model = net()
    model.block.compile()
    model.last = torch.compile(model.last)
    return model


MAKE = {
    "a compiled model": lambda: torch.compile(net()),
    "compiled parts": compiled_parts,
    "a compiled function": lambda: net(torch.compile(lambda block, x: block(x))),
    "older checkpoints": lambda: net(
        lambda block, x: checkpoint(block, x.clone().requires_grad_(), use_reentrant=True)
    ),
    "newer checkpoints": lambda: net(by_checkpoint),
    "nested": lambda: net(lambda block, x: by_checkpoint(lambda x: by_checkpoint(block, x), x)),
}


def trained(model: nn.Module, accumulation: int = 4) -> list[torch.Tensor]:
    executor = training(model, options(accumulation=accumulation))
    for _ in range(2):
        executor(X, Y)
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.fixture(scope="module")
def eager_weights() -> list[torch.Tensor]:
    """Return the weights of the plain model that eager PyTorch has trained as ``trained`` does."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in zip(X.chunk(4), Y.chunk(4), strict=True):
            _, loss = model(x, y)
            (loss / 4).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
def test_a_model_that_is_seen_through_trains_as_the_plain_one(
    make: Callable[..., Any], eager_weights: list[torch.Tensor]
) -> None:
    torch.testing.assert_close(trained(make()), eager_weights)


def mixing(checkpointed: bool) -> Having:
    """Whose first part, run again or not, mixes formats and finds a weight in a list."""

    def part(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        halved = model.norm(torch.tanh(model.first(x)).half()) * model.held[0]  # float and half
        labels = nn.functional.one_hot(y.argmax(1), 4)
        with torch.autocast("cpu", torch.bfloat16):
            return halved.float() @ model.first.weight + labels

    def forward(
        model: Having, x: torch.Tensor, y: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = (
            checkpoint(part, model, x, y, use_reentrant=False)
            if checkpointed
            else part(model, x, y)
        )
        out = model.last(out.float())
        return out, nn.functional.mse_loss(out, y)

    torch.manual_seed(4)
    layers = {"first": nn.Linear(4, 4), "last": nn.Linear(4, 3), "norm": nn.GroupNorm(2, 4)}
    scale = nn.Parameter(torch.ones(4))
    return Having(forward, scale=scale, held=[scale], **layers)


@pytest.mark.slow
def test_a_function_that_runs_again_keeps_its_first_rules() -> None:
    ours, without = (trained(mixing(checkpointed), 1) for checkpointed in (True, False))

    for own, other, before in zip(ours, without, mixing(False).parameters(), strict=True):
        torch.testing.assert_close(own, other)
        assert not torch.equal(own, before)


def test_norms_that_run_again_count_as_they_do_in_torch() -> None:
    model = net(by_checkpoint)
    model.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    trains_alike(model, X, Y)


def test_checkpoints_of_other_threads_are_torchs_own() -> None:
    elsewhere: list[torch.Tensor] = []

    def somewhere_else() -> None:
        elsewhere.append(torch.ones(3, requires_grad=True))
        by_checkpoint(torch.exp, elsewhere[-1]).sum().backward()

    def calling(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=somewhere_else)
        thread.start()
        thread.join()
        return by_checkpoint(block, x)

    before = CheckpointFunction.apply
    trains_alike(net(calling), X, Y, eager=net())
    assert CheckpointFunction.apply == before
    assert elsewhere
    for leaf in elsewhere:
        torch.testing.assert_close(leaf.grad, leaf.detach().exp())


def test_checkpoints_are_refused_where_their_gradients_would_be_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "checkpoint_without_reentrant_generator_impl"
    path, lost = private.ROWS[name]
    monkeypatch.setitem(private.ROWS, name, (f"{path}_renamed", lost))
    trains_alike(net(), X, Y)
    with pytest.raises(RuntimeError, match=private.CHECKPOINTS):
        trained(net(by_checkpoint))
