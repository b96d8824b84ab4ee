"""Models over the same weights: those with modules in common, several programs of one."""

import copy
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.closeness import FUNCTION, near
from helpers.wrapping import EagerPair, Graded, Having, compilations, normal, options

adam = functools.partial(torch.optim.Adam, lr=0.05)


def discriminate(models: Having, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        fake = models.generator(noise)
    score = models.discriminator(fake) - models.discriminator(real)
    return poptorch.identity_loss(F.softplus(score).mean(), reduction="none")


def generate(models: Having, noise: torch.Tensor) -> torch.Tensor:
    score = models.discriminator(models.generator(noise))
    return poptorch.identity_loss(F.softplus(-score).mean(), reduction="none")


def nets() -> tuple[nn.Module, nn.Module]:
    """A generator, and a discriminator that is a training model itself."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    return generator, Graded(first=nn.Linear(5, 6), tanh=nn.Tanh(), second=nn.Linear(6, 1))


class Wrapped:
    """Training models over common modules, and the same in plain torch."""

    def __init__(self, *makers: Any) -> None:
        self.nets = nets()
        made = [make(*self.nets) for make in makers]
        self.plain, copies = copy.deepcopy((self.nets, made))
        train = poptorch.trainingModel
        self.executors = [train(m, options(), adam(part.parameters())) for m, part in made]
        self.eager = [(module, adam(part.parameters())) for module, part in copies]
        self.draw = torch.Generator().manual_seed(1)

    def call(self, which: int, *shapes: tuple[int, ...]) -> None:
        args = [torch.randn(shape, generator=self.draw) for shape in shapes]
        loss = self.executors[which](*args)
        module, optimizer = self.eager[which]
        module.zero_grad()
        expected = module(*args)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), **near(20, 4, size=0.1))

    def check(self) -> None:
        for ours, theirs in zip(self.nets, self.plain, strict=True):
            rounded = near(20, 40, size=0.1)
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), **rounded)


REAL, NOISE = (8, 5), (8, 3)
# What is wrapped, what is trained of it, and the shapes of its inputs.
MAKERS = {
    "D": (lambda g, d: (Having(discriminate, generator=g, discriminator=d), d), REAL, NOISE),
    "G": (lambda g, d: (Having(generate, generator=g, discriminator=d), g), NOISE),
    "S": (lambda g, d: (d, d), REAL, (8, 1)),
}
# The order of wrapping, then what happens: a letter for a call; h, d: copy weights to host or
# device; x: detach; k: destroy; ?: compare
SCRIPTS = {
    "copies by hand": "DG D G h1 d0 D h0 d1 G h1 d0 D h0 d1 G h1 d0",
    "reading brings them from whichever trained last": "DG D G ? D ? h0 G h0 G",
    "one device in turns": "DG D x0 G x1 D x0 G x1",
    "the first is destroyed": "DG D G k0 G ? k1",
    "the older one copies to the host": "DS D S S h0 ? D S h0 h1 S h0 S k0 ?",
    "a module of others is one itself, wrapped last": "DGS D G S D G S D G S",
    "a module of others is one itself, wrapped first": "SDG S D G S D G S D G",
}


def random_order(seed: int) -> str:
    """Calls, reads, copies to the host and detaching in any order: none may lose a step."""
    draw = random.Random(seed)
    order = "".join(draw.sample("DGS", draw.choice([2, 3, 3])))
    words = [*order * 3, "?", *(f"{do}{at}" for do in "hx" for at in range(len(order)))]
    return " ".join([order, *order, *draw.choices(words, k=25)])


@pytest.mark.slow
@pytest.mark.parametrize("script", [*SCRIPTS, *range(5)])
def test_models_train_as_in_plain_torch(script: str | int) -> None:
    order, *words = (SCRIPTS[script] if isinstance(script, str) else random_order(script)).split()
    models, kind = Wrapped(*(MAKERS[letter][0] for letter in order)), poptorch.PoplarExecutor
    do = {
        "h": kind.copyWeightsToHost,
        "d": kind.copyWeightsToDevice,
        "x": kind.detachFromDevice,
        "k": kind.destroy,
    }
    for word in words:
        if word == "?":
            models.check()
        elif word in MAKERS:
            models.call(order.index(word), *MAKERS[word][1:])
        elif word[0] != "x" or models.executors[int(word[1])].isAttachedToDevice():
            do[word[0]](models.executors[int(word[1])])
    models.check()
    if "k0" in words and "k1" in words:
        assert type(models.nets[0].__dict__["_modules"]["0"].__dict__["_parameters"]) is dict


@pytest.mark.parametrize(
    ("library", "common"), [(torch.optim, True), (torch.optim, False), (poptorch.optim, False)]
)
def test_a_warning_names_an_optimizer_of_two_models_that_would_disagree(
    library: Any, common: bool, caplog: pytest.LogCaptureFixture
) -> None:
    inner = nets()[1]
    other = Having(lambda m, x, y: F.l1_loss(m.inner(x), y), inner=inner if common else nets()[1])
    optimizer = library.Adam([*{*inner.parameters(), *other.parameters()}], lr=0.05)
    executors = [poptorch.trainingModel(m, options(), optimizer) for m in (inner, other)]
    args = torch.ones(2, 5), torch.ones(2, 1)
    if library is torch.optim:
        for executor in executors:  # in turns, it goes from one to the other
            executor(*args)
            executor.detachFromDevice()
        assert "Another training model already uses this optimizer" not in caplog.text
    for executor in executors * 2:
        executor(*args)
    warnings = caplog.text.count("Another training model already uses this optimizer")
    assert warnings == (1 if common or library is poptorch.optim else 0)
    if library is torch.optim and not common:
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}


def test_trained_weights_reach_a_validation_model_after_data_was_assigned() -> None:
    torch.manual_seed(0)
    model = Graded(both=True, layer=nn.Linear(3, 2))
    trainer = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    validation = poptorch.inferenceModel(model, options())
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    trainer(x, y)
    validation(x, y)

    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    trainer(x, y)
    output, _ = validation(x, y)

    expected, _ = copy.deepcopy(model)(x, y)
    torch.testing.assert_close(output, expected.detach(), **near(20, 4))


@pytest.mark.parametrize("ends", ["destroyed", "dropped"])
def test_weights_are_read_after_a_validation_model_has_ended(ends: str) -> None:
    pair = EagerPair(nets()[1], adam, **near(10, 2))
    x, y = torch.randn(4, 5), torch.randn(4, 1)
    validation = poptorch.inferenceModel(pair.model, options())
    pair.step(x, y)
    torch.testing.assert_close(validation(x), pair.eager(x))
    if ends == "destroyed":
        validation.destroy()
    del validation
    pair.step(x, y)
    pair.compare()


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("cut", "rows"),
    [(lambda weight: weight, 4), (torch.t, 4), (lambda weight: weight[1:3], 2)],
    ids=["same", "transposed", "part"],
)
def test_parameters_in_one_memory_are_common(
    cut: Callable[..., Any], rows: int, late: bool
) -> None:
    """Also where each model has a parameter of its own over it, put there before or after."""
    layers = [nn.Linear(4, 4), nn.Linear(4, rows)]
    plain = copy.deepcopy(layers)

    def share(one: nn.Linear, other: nn.Linear) -> None:
        other.weight.data = cut(one.weight.data)

    share(*plain)
    if not late:
        share(*layers)
    executors, steps = [], []
    for layer, eager in zip(layers, plain, strict=True):
        model = Having(lambda m, x, y: F.mse_loss(m.layer(x), y), layer=layer)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        executors.append(poptorch.trainingModel(model, options(), sgd))
        steps.append((eager, torch.optim.SGD(eager.parameters(), lr=0.1)))
    held, (x, y) = [layer.weight for layer in layers], torch.randn(2, 4, 4)
    if late:
        executors[0].compile(x, y)
        share(*layers)
    turns = ((0, 0), (0, 1), (1, 0), (1, None), (0, None), (1, None), (0, 1), (1, 1))
    for step, (at, read) in enumerate(turns):
        eager, optimizer = steps[at]
        executors[at](x, y[:, : len(eager.bias)])
        optimizer.zero_grad()
        F.mse_loss(eager(x), y[:, : len(eager.bias)]).backward()
        optimizer.step()
        if read is not None and (step > 2 or not late):  # through the tensor, not the module
            ours, theirs = held[read], plain[read].weight
            torch.testing.assert_close(ours + 0, theirs + 0, **near(16, 8))
    for layer, eager in zip(layers[::-1], plain[::-1], strict=True):
        torch.testing.assert_close(layer.state_dict(), eager.state_dict(), **near(16, 8))


X, Y = normal(8, 4), normal(8, 4, seed=1)


class Net(nn.Module):
    """Statistics, a mode that the module itself looks at, a sub-module's own mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        out = self.norm(self.linear(x))
        if self.training:
            out = out * 2
        return out if y is None else (out, nn.functional.mse_loss(out, y))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("backend", ["reference", "staged"])
def test_training_and_validating_follow_the_mode(backend: str) -> None:
    pair = EagerPair(Net(), sgd, options().backend(backend))
    inference = poptorch.inferenceModel(pair.model, options())
    for mode in (True, False, False, True, False, True):
        for module in (pair.model, pair.eager, inference):
            module.train(mode)
        pair.eager.training = True  # the wrapped module's own mode is the wrapper's
        pair.step(X, Y)
        pair.eager.training = mode
        assert torch.equal(inference(X), copy.deepcopy(pair.eager)(X).detach())
    for frozen in (False, True, False):  # statistics alone: the commonest reason
        for model in (pair.model, pair.eager):
            model.norm.train(not frozen)
        pair.step(X, Y)
    pair.compare()


class Labelled(Net):
    """A forward that needs labels to train: the example of the user guide."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None:
        out = nn.functional.dropout(self.norm(self.linear(x)), training=self.training)
        return (out, nn.functional.mse_loss(out, y)) if self.training else out


@pytest.mark.parametrize("called_before", [False, True])
def test_an_inference_model_remains_in_eval_mode(called_before: bool) -> None:
    model = Labelled().eval()
    inference = poptorch.inferenceModel(model, options())
    if called_before:
        inference(X)
    model.train()
    training = poptorch.trainingModel(model, options(), sgd(model.parameters()))
    for _ in range(2):
        training(X, Y)
        assert torch.equal(inference(X), copy.deepcopy(model).eval()(X).detach())
        assert all(module.training for module in model.modules())
    assert not inference.explain(X).fatal
    inference.train()
    with pytest.raises(AttributeError):
        inference(X)


def test_a_short_last_batch_trains_like_eager() -> None:
    chosen = options().backend("staged").programs(2)
    pair = EagerPair(Net(), sgd, chosen)
    data = torch.utils.data.TensorDataset(normal(19, 4), normal(19, 4, seed=1))
    loader = poptorch.DataLoader(chosen, data, batch_size=8, drop_last=False)
    with compilations() as compiled:
        for _ in range(2):
            for x, y in loader:
                pair.step(x, y)
    assert len(compiled) == 2
    pair.compare()


@pytest.mark.larger("test_models_train_as_in_plain_torch")
def test_detaching_saving_and_other_modes_in_between(tmp_path: Path) -> None:
    adam = functools.partial(torch.optim.Adam, lr=0.1, betas=(0.5, 0.9), eps=1e-2)
    # A norm over three rows makes errors larger: of these sums eager torch is 2e-05 from float64.
    pair = EagerPair(Net(), adam, options().programs(2), **near(8 + FUNCTION, 5, size=4))
    for rows, mode in ((8, True), (3, True), (3, False), (8, False), (8, True)):
        pair.train(mode)
        pair.eager.training = True
        pair.step(X[:rows], Y[:rows])
        pair.wrapped.save(tmp_path / "model.poptorch")
        pair.wrapped.detachFromDevice()
    pair.compare()


def test_weights_that_are_set_between_reach_every_program() -> None:
    model = Net().eval()
    wrapper = poptorch.inferenceModel(model, options().programs(2))
    for scale in (1.0, 2.0):
        with torch.no_grad():
            model.linear.weight.fill_(scale)
            model.norm.running_mean.fill_(scale)
        if wrapper.isCompiled():
            wrapper.copyWeightsToDevice()
        for x in (X, X[:3], X):
            assert torch.equal(wrapper(x), model(x).detach())
    assert torch.equal(wrapper(X, Y)[1], model(X, Y)[1].detach())  # the one of X[:3] goes
    assert torch.equal(wrapper(X), model(X).detach())
    one = poptorch.inferenceModel(model, options().programs(1))
    one(X)
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        one(X[:4])


class Counting(Net):
    """It computes with the number of rows in Python, so each number has its own program."""

    def forward(
        self, x: torch.Tensor, y: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x * len(range(x.shape[0])), y)


def test_the_least_recently_used_goes_first_and_modes_do_not_count() -> None:
    wrapper = poptorch.inferenceModel(Counting(), options().programs(2))
    with compilations() as compiled:
        # The second number of rows is tried with a symbol first, once.
        for rows, so_far in ((8, 2), (4, 5), (8, 5), (3, 7), (8, 7), (4, 9)):
            for training in (True, False):
                (wrapper if rows == 8 else wrapper.model).train(training)
                assert wrapper(normal(rows, 4)).shape == (rows, 4)
            assert len(compiled) == so_far


def test_a_batch_that_does_not_divide_into_iterations_is_evaluated() -> None:
    model, chosen = Net().eval(), options(iterations=4).programs(2)
    wrapper = poptorch.inferenceModel(model, chosen)
    data = torch.utils.data.TensorDataset(normal(21, 4))
    loader = poptorch.DataLoader(chosen, data, batch_size=2, drop_last=False)
    parts = [wrapper(x) for (x,) in loader]
    assert [len(part) for part in parts] == [8, 8, 5]
    torch.testing.assert_close(torch.cat(parts), model(data.tensors[0]).detach())


def test_a_failed_compilation_for_other_inputs_changes_nothing() -> None:
    model = Net()
    training = poptorch.trainingModel(model, options().programs(2))
    training(X, Y)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="reduction dim"):
        training(normal(8, 5), Y)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    training(X, Y)
    assert not torch.equal(model.state_dict()["linear.weight"], before["linear.weight"])


@pytest.mark.parametrize("detaches", [False, True])
def test_weights_that_only_one_program_trains_keep_their_moments(detaches: bool) -> None:
    def forward(model: Having, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(model.layer(x) * (model.scale if model.training else 1.0), y)

    scaled = Having(forward, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.ones(4)))
    pair = EagerPair(Having(lambda model, x, y: model.inner(x, y), inner=scaled), sgd)
    for mode in (True, True, False, True, False):
        pair.train(mode)
        pair.step(X, Y)
        if not mode:
            if detaches:
                pair.wrapped.detachFromDevice()
            pair.compare()
