"""Training models that have modules in common, as a GAN's two: each goes on from the other's."""

import copy
import functools
import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch
from helpers.closeness import near
from helpers.wrapping import Graded, Having, Twins, options

adam = functools.partial(torch.optim.Adam, lr=0.05)


def discriminate(models, real, noise):
    with torch.no_grad():
        fake = models.generator(noise)
    score = models.discriminator(fake) - models.discriminator(real)
    return poptorch.identity_loss(F.softplus(score).mean(), reduction="none")


def generate(models, noise):
    score = models.discriminator(models.generator(noise))
    return poptorch.identity_loss(F.softplus(-score).mean(), reduction="none")


def nets() -> tuple[nn.Module, nn.Module]:
    """A generator, and a discriminator that is a training model itself."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))
    return generator, Graded(first=nn.Linear(5, 6), tanh=nn.Tanh(), second=nn.Linear(6, 1))


class Wrapped:
    """Training models over common modules, and the same in plain torch."""

    def __init__(self, *makers) -> None:
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
MAKERS = {"D": (lambda g, d: (Having(discriminate, generator=g, discriminator=d), d), REAL, NOISE),
          "G": (lambda g, d: (Having(generate, generator=g, discriminator=d), g), NOISE),
          "S": (lambda g, d: (d, d), REAL, (8, 1))}  # fmt: skip
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


def anyhow(seed: int) -> str:
    """Calls, reads, copies to the host and detaching in any order: none may lose a step."""
    draw = random.Random(seed)
    order = "".join(draw.sample("DGS", draw.choice([2, 3, 3])))
    words = [*order * 3, "?", *(f"{do}{at}" for do in "hx" for at in range(len(order)))]
    return " ".join([order, *order, *draw.choices(words, k=25)])


@pytest.mark.parametrize("script", [*SCRIPTS, *range(5)])
def test_models_train_as_in_plain_torch(script: str | int) -> None:
    order, *words = (SCRIPTS[script] if isinstance(script, str) else anyhow(script)).split()
    models = Wrapped(*(MAKERS[letter][0] for letter in order))
    kind = poptorch.PoplarExecutor
    do = {"h": kind.copyWeightsToHost, "d": kind.copyWeightsToDevice, "x": kind.detachFromDevice,
          "k": kind.destroy}  # fmt: skip
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
def test_an_optimizer_of_two_models_is_said_where_they_would_disagree(library, common, caplog):
    inner = nets()[1]
    own = inner if common else nets()[1]
    other = Having(lambda m, x, y: F.l1_loss(m.inner(x), y), inner=own)
    optimizer = library.Adam([*{*inner.parameters(), *other.parameters()}], lr=0.05)
    executors = [poptorch.trainingModel(m, options(), optimizer) for m in (inner, other)]
    args = torch.ones(2, 5), torch.ones(2, 1)
    if library is torch.optim:
        for executor in executors:  # in turns, it goes from one to the other
            executor(*args)
            executor.detachFromDevice()
        assert "in use by another training model" not in caplog.text
    for executor in executors * 2:
        executor(*args)
    said = caplog.text.count("in use by another training model")
    assert said == (1 if common or library is poptorch.optim else 0)
    if library is torch.optim and not common:
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}


@pytest.mark.parametrize("ends", ["destroyed", "dropped"])
def test_weights_are_read_after_a_validation_model_has_ended(ends: str) -> None:
    twins = Twins(nets()[1], adam, **near(10, 2))
    x, y = torch.randn(4, 5), torch.randn(4, 1)
    validation = poptorch.inferenceModel(twins.model, options())
    twins.step(x, y)
    torch.testing.assert_close(validation(x), twins.eager(x))
    if ends == "destroyed":
        validation.destroy()
    del validation
    twins.step(x, y)
    twins.compare()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("cut", "rows"),
    [(lambda weight: weight, 4), (torch.t, 4), (lambda weight: weight[1:3], 2)],
    ids=["same", "transposed", "part"],
)
def test_parameters_in_one_memory_are_common(cut, rows: int, late: bool) -> None:
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
