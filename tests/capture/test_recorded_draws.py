"""Random numbers in forward: which are new, which are drawn again, and which never change."""

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import dropout, gumbel_softmax, mse_loss, rrelu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import poptorch
from helpers.drawing import draws_of, trains_alike
from helpers.wrapping import (
    Calling,
    Having,
    infer,
    normal,
    options,
    runs_compiled,
    training,
    unchecked,
)

X, Y = normal(8, 6), normal(8, 3, seed=1)
Block = Callable[[torch.Tensor], torch.Tensor]


def newer(block: Block, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def older(block: Block, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def net(calling: Callable[[Block, torch.Tensor], torch.Tensor]) -> Having:
    """Two layers with dropout, each called in some way, and a loss."""

    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        for layer in m.layers:
            x = calling(lambda h, layer=layer: dropout(torch.tanh(layer(h))), x)
        return mse_loss(m.last(x), y)

    torch.manual_seed(4)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
    return Having(forward, first=nn.Linear(6, 6), layers=layers, last=nn.Linear(6, 3))


def nested(block: Block, x: torch.Tensor) -> torch.Tensor:
    return newer(lambda h: newer(block, h) + dropout(h, 0.3), x)


def mixed(block: Block, x: torch.Tensor) -> torch.Tensor:
    return newer(lambda h: older(block, h) + dropout(h, 0.3), x)


def around_autocast(block: Block, x: torch.Tensor) -> torch.Tensor:
    def in_half(h: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(h)

    return newer(in_half, x).float()


def within_autocast(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return newer(block, x).float()


def older_within_autocast(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return older(block, x).float()


def in_sequence(block: Block, x: torch.Tensor) -> torch.Tensor:
    parts = [block, nn.Dropout(0.2), nn.Tanh(), nn.Dropout(0.1)]
    return checkpoint_sequential(parts, 2, x, use_reentrant=False)


def of_every_kind(block: Block, x: torch.Tensor) -> torch.Tensor:
    def noisy(h: torch.Tensor) -> torch.Tensor:
        h = block(h)
        h = h * torch.rand_like(h) + gumbel_softmax(h) + torch.normal(h, 0.1)
        h = h * torch.bernoulli(torch.sigmoid(h)) + rrelu(h, training=True)
        return h + torch.randint(0, 3, (6,)) * h + h.new_empty(1, 6).bernoulli_(0.5) * h

    return newer(noisy, x)


def forked(block: Block, x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        first = block(x)
    return first + block(x)


def restored(block: Block, x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    first = block(x)
    torch.set_rng_state(state)
    return first - block(x) / 2 + dropout(x, 0.1)


def of_the_default_generator(block: Block, x: torch.Tensor) -> torch.Tensor:
    state = torch.default_generator.get_state()
    first = block(x)
    torch.default_generator.set_state(state)
    return first - block(x) / 2 + torch.rand(x.shape, generator=torch.default_generator)


def seeded(block: Block, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(4)
    return block(x) + torch.randn(6) + torch.bernoulli(torch.sigmoid(x))


def from_a_generator(block: Block, x: torch.Tensor) -> torch.Tensor:
    made = torch.Generator().manual_seed(4)
    noise = torch.empty_like(x).uniform_(generator=made) + torch.randn(6, generator=made)
    noise = noise + torch.bernoulli(torch.full((6,), 0.5), generator=made)
    return block(x) + noise + torch.empty(6).bernoulli_(0.3, generator=made)


class Reversible(torch.autograd.Function):
    """Computes its activations again in the backward pass, from the random state of before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, block: Any) -> Any:
        ctx.state, ctx.block = torch.get_rng_state(), block
        ctx.save_for_backward(x)
        return block(x.detach())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            x = x.detach().requires_grad_()
            out = ctx.block(x)
        return *torch.autograd.grad(out, x, gradient), None


def reversible(block: Block, x: torch.Tensor) -> torch.Tensor:
    return Reversible.apply(x, lambda h: dropout(torch.tanh(h))) + block(x)


CHECKPOINTS = [
    newer,
    older,
    nested,
    mixed,
    around_autocast,
    within_autocast,
    older_within_autocast,
    in_sequence,
    of_every_kind,
]
STATES = [forked, restored, of_the_default_generator, seeded, from_a_generator, reversible]


@pytest.mark.slow
@pytest.mark.parametrize("calling", CHECKPOINTS)
def test_checkpoints_with_dropout_train_as_in_eager_torch(calling: Callable[..., Any]) -> None:
    trains_alike(net(calling), net(calling), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("calling", STATES)
def test_random_states_in_forward_have_the_same_meaning_as_in_eager_torch(
    calling: Callable[..., Any],
) -> None:
    trains_alike(net(calling), net(calling), X, Y)


@pytest.mark.slow
@pytest.mark.parametrize("calling", [newer, nested, restored, from_a_generator, reversible])
def test_lanes_keep_the_draws_of_each_micro_batch(calling: Callable[..., Any]) -> None:
    executor = trains_alike(net(calling), net(calling), X, Y, accumulation=4)

    assert executor.plan().program.lanes is not None


@pytest.mark.larger("test_checkpoints_with_dropout_train_as_in_eager_torch")
def test_compiled_checkpoints_reuse_the_draws_of_the_forward_pass() -> None:
    executor = trains_alike(net(newer), net(newer), X, Y, opts=options("inductor"))

    assert runs_compiled(executor)


def test_an_older_checkpoint_trains_nothing_from_inputs_without_gradient() -> None:
    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return mse_loss(m.last(older(m.first, x)), y)

    model = Having(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 3))
    eager = copy.deepcopy(model)

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True"):
        trains_alike(model, eager, X, Y)


def test_a_checkpoint_without_the_random_state_draws_new_numbers() -> None:
    """In eager PyTorch the gradient does not belong to the output, either."""

    def forward(m: Having, x: torch.Tensor) -> torch.Tensor:
        out = checkpoint(
            lambda h: dropout(h * m.weight).exp(), x, use_reentrant=False, preserve_rng_state=False
        )
        return poptorch.identity_loss(out, reduction="sum")

    model = Having(forward, weight=nn.Parameter(torch.ones(64)))
    executor = training(model)
    executor.compile(torch.ones(4, 64))

    assert len(draws_of(executor)) == 2


def test_draws_that_are_made_again_are_one_node() -> None:
    executor = training(net(newer))
    executor.compile(X, Y)

    found = draws_of(executor)
    assert [draw.number for draw in found] == [0, 1]
    assert [draw.stream for draw in found] == [0, 0]
    assert {draw.operator for draw in found} == {"aten.bernoulli_"}


def test_a_view_that_was_made_before_a_tensor_is_drawn_shows_the_drawn_values() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = torch.empty_like(x)
        in_a_row = mask.view(-1)
        mask.bernoulli_(0.5)
        return mask * 1, in_a_row * 1

    mask, in_a_row = infer(forward, torch.ones(4, 6))

    torch.testing.assert_close(in_a_row, mask.view(-1), rtol=0, atol=0)


# Generators of the user's.


def drawing_from(generator: torch.Generator) -> Having:
    def forward(m: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = m.first(x)
        x = x * torch.rand(x.shape, generator=m.own) + torch.empty(6).normal_(generator=m.own)
        x = x * torch.bernoulli(torch.sigmoid(x), generator=m.own)
        x = x + torch.empty_like(x).uniform_(generator=m.own)
        return mse_loss(m.last(x * torch.empty_like(x).bernoulli_(0.3, generator=m.own)), y)

    torch.manual_seed(4)
    layers = {"first": nn.Linear(6, 6), "last": nn.Linear(6, 3)}
    return Having(forward, own=generator, **layers)


@pytest.mark.slow
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_generator_of_the_model_continues_as_in_eager_torch(accumulation: int) -> None:
    ours, eagers = (torch.Generator().manual_seed(11) for _ in range(2))

    trains_alike(drawing_from(ours), drawing_from(eagers), X, Y, accumulation=accumulation)

    assert torch.equal(ours.get_state(), eagers.get_state())


def test_compiling_draws_from_no_generator() -> None:
    own = torch.Generator().manual_seed(11)
    executor = training(drawing_from(own), options(accumulation=4))
    states = own.get_state(), torch.get_rng_state()

    executor.compile(X, Y)

    assert torch.equal(own.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


def test_a_generator_that_only_a_closure_holds_continues_too() -> None:
    own, same = (torch.Generator().manual_seed(2) for _ in range(2))
    executor = poptorch.inferenceModel(
        Calling(lambda x: x + torch.rand(6, generator=own)), options()
    )

    for _ in range(2):
        torch.testing.assert_close(executor(X), X + torch.rand(6, generator=same))


def test_a_generator_that_forward_seeds_starts_again_each_time() -> None:
    own = torch.Generator().manual_seed(2)

    def forward(x: torch.Tensor) -> torch.Tensor:
        own.manual_seed(5)
        return x + torch.rand(6, generator=own)

    executor = poptorch.inferenceModel(Calling(forward), options())

    torch.testing.assert_close(executor(X), executor(X))
    torch.testing.assert_close(executor(X), forward(X))


def test_a_program_with_a_generator_of_the_model_says_that_it_runs_interpreted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = training(drawing_from(torch.Generator()), options("inductor"))

    executor(X, Y)

    assert not runs_compiled(executor)
    assert "draws from a generator of the model at test_recorded_draws.py" in caplog.text


# What cannot be modelled.


def looping(x: torch.Tensor) -> torch.Tensor:
    return poptorch.for_loop(3, lambda h: dropout(h, 0.3), [x])[0]


def seeds_a_loop(x: torch.Tensor) -> Any:
    torch.manual_seed(3)
    return looping(x)


def seeds_within_a_loop(x: torch.Tensor) -> Any:
    def body(h: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return dropout(h)

    return poptorch.for_loop(3, body, [x])[0]


def repeats_within_a_loop(x: torch.Tensor) -> Any:
    def body(h: torch.Tensor) -> Any:
        with torch.random.fork_rng(devices=[]):
            once = dropout(h)
        return once + dropout(h)

    return poptorch.for_loop(3, body, [x])[0]


def repeats_a_loop(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        once = looping(x)
    return once + looping(x)


def draws_other_shapes(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        once = torch.rand(6)
    return x + once + torch.rand(5).sum()


def draws_by_other_values(x: torch.Tensor) -> torch.Tensor:
    with torch.random.fork_rng(devices=[]):
        once = torch.bernoulli(torch.sigmoid(x))
    return once + torch.bernoulli(torch.sigmoid(x * 2))


def samples_from_a_seed(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(3)
    return x + torch.multinomial(torch.softmax(x, -1), 6)


REFUSED = [
    seeds_a_loop,
    seeds_within_a_loop,
    repeats_within_a_loop,
    repeats_a_loop,
    draws_other_shapes,
    draws_by_other_values,
    samples_from_a_seed,
]


@pytest.mark.parametrize("forward", REFUSED)
def test_draws_that_a_state_cannot_give_are_refused_with_their_line(
    forward: Callable[..., Any],
) -> None:
    with pytest.raises(
        poptorch.Error, match=r"(?s)forward has set the state.*test_recorded_draws.py:"
    ):
        infer(forward, X)


_counted = itertools.count()


def counts(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(next(_counted))
    return dropout(x)


def seeds_by_chance(x: torch.Tensor) -> Any:
    torch.seed()
    return dropout(x)


def has_a_generator_seeded_by_chance(x: torch.Tensor) -> torch.Tensor:
    made = torch.Generator()
    made.seed()
    return x + torch.rand(6, generator=made)


ANEW = [counts, seeds_by_chance, has_a_generator_seeded_by_chance]


@pytest.mark.parametrize("forward", ANEW)
def test_another_seed_in_each_run_is_refused_with_its_line(forward: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match=r"(?s)differently each time.*test_recorded_draws.py:"):
        infer(forward, X)


def test_draws_after_a_loop_continue_the_sequence() -> None:
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return looping(x) * 0 + torch.rand(6), torch.rand(6)

    first, second = infer(forward, X)

    assert not torch.equal(first[0], second)


def test_a_seed_that_another_thread_sets_during_a_capture_is_the_hosts() -> None:
    torch.manual_seed(3)

    def forward(x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=torch.manual_seed, args=(9,))
        thread.start()
        thread.join()
        return x + torch.rand(6)

    infer(forward, X, opts=unchecked())  # the check puts back what was before it

    assert torch.initial_seed() == 9


def test_seeds_in_forward_leave_the_host_alone() -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()

    def forward(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(8)
        return x + torch.rand(6)

    infer(forward, X)

    assert torch.equal(torch.get_rng_state(), state)
