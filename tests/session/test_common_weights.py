"""Training models that have modules in common, as a GAN's two: each goes on from the other's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import poptorch


class Discriminate(nn.Module):
    def __init__(self, generator: nn.Module, discriminator: nn.Module) -> None:
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, real, noise):
        with torch.no_grad():
            fake = self.generator(noise)
        score = self.discriminator(fake) - self.discriminator(real)
        return poptorch.identity_loss(F.softplus(score).mean(), reduction="none")


class Generate(Discriminate):
    def forward(self, noise):
        score = self.discriminator(self.generator(noise))
        return poptorch.identity_loss(F.softplus(-score).mean(), reduction="none")


class Scores(nn.Module):
    """A discriminator that is a training model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))

    def forward(self, x, y=None):
        out = self.layers(x)
        return out if y is None else F.mse_loss(out, y)


def nets() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5)), Scores()


def options() -> poptorch.Options:
    return poptorch.Options().backend("reference").showCompilationProgressBar(False)


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(module.parameters(), lr=0.05)


class Wrapped:
    """Training models over common modules, and the same in plain torch."""

    def __init__(self, *makers) -> None:
        self.nets, self.plain = nets(), nets()
        self.executors, self.eager = [], []
        for make in makers:
            module, trained = make(*self.nets)
            self.executors.append(poptorch.trainingModel(module, options(), adam(trained)))
            module, trained = make(*self.plain)
            self.eager.append((module, adam(trained)))
        self.draw = torch.Generator().manual_seed(1)

    def call(self, which: int, *shapes: tuple[int, ...]) -> None:
        args = [torch.randn(shape, generator=self.draw) for shape in shapes]
        loss = self.executors[which](*args)
        module, optimizer = self.eager[which]
        module.zero_grad()
        expected = module(*args)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-5, atol=1e-6)

    def check(self) -> None:
        for ours, theirs in zip(self.nets, self.plain, strict=True):
            torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def discriminate(g: nn.Module, d: nn.Module) -> tuple[nn.Module, nn.Module]:
    return Discriminate(g, d), d


def generate(g: nn.Module, d: nn.Module) -> tuple[nn.Module, nn.Module]:
    return Generate(g, d), g


def score(g: nn.Module, d: nn.Module) -> tuple[nn.Module, nn.Module]:
    return d, d


REAL, NOISE = (8, 5), (8, 3)


@pytest.mark.parametrize("copies", [False, True], ids=["no copies", "copies by hand"])
def test_a_gan_trains_as_in_plain_torch(copies: bool) -> None:
    both = Wrapped(discriminate, generate)
    for step in range(4):
        both.call(0, REAL, NOISE)
        if copies and step:
            both.executors[0].copyWeightsToHost()
            both.executors[1].copyWeightsToDevice()
        both.call(1, NOISE)
        if copies:
            both.executors[1].copyWeightsToHost()
            both.executors[0].copyWeightsToDevice()
    both.check()


def test_reading_weights_brings_them_from_whichever_model_trained_last() -> None:
    both = Wrapped(discriminate, generate)
    both.call(0, REAL, NOISE)
    both.call(1, NOISE)
    both.check()
    both.call(0, REAL, NOISE)
    both.check()
    both.executors[0].copyWeightsToHost()
    both.call(1, NOISE)
    both.executors[0].copyWeightsToHost()  # which are older than what the other one has
    both.call(1, NOISE)
    both.check()


@pytest.mark.parametrize("last", [True, False], ids=["wrapped last", "wrapped first"])
def test_a_module_inside_of_another_training_model_is_one_itself(last: bool) -> None:
    makers = (discriminate, generate, score) if last else (score, discriminate, generate)
    shapes = {score: (REAL, (8, 1)), discriminate: (REAL, NOISE), generate: (NOISE,)}
    several = Wrapped(*makers)
    for _ in range(3):
        for which, make in enumerate(makers):
            several.call(which, *shapes[make])
    several.check()


@pytest.mark.parametrize("first", [0, 1])
def test_destroying_one_leaves_the_other_connected(first: int) -> None:
    both = Wrapped(discriminate, generate)
    shapes = ((REAL, NOISE), (NOISE,))
    both.call(0, *shapes[0])
    both.call(1, *shapes[1])
    both.executors[first].destroy()
    both.call(1 - first, *shapes[1 - first])
    both.check()
    both.executors[1 - first].destroy()
    both.check()
    assert type(both.nets[0].__dict__["_modules"]["0"].__dict__["_parameters"]) is dict


def test_validation_follows_both_models() -> None:
    both = Wrapped(discriminate, generate)
    validation = poptorch.inferenceModel(nn.Sequential(*both.nets), options())
    plain = nn.Sequential(*both.plain)
    noise = torch.randn(NOISE, generator=both.draw)
    for _ in range(2):
        both.call(0, REAL, NOISE)
        torch.testing.assert_close(validation(noise), plain(noise).detach(), rtol=1e-4, atol=1e-5)
        both.call(1, NOISE)
        torch.testing.assert_close(validation(noise), plain(noise).detach(), rtol=1e-4, atol=1e-5)


def test_one_device_is_taken_in_turns() -> None:
    both = Wrapped(discriminate, generate)
    for _ in range(2):
        both.call(0, REAL, NOISE)
        both.executors[0].detachFromDevice()
        both.call(1, NOISE)
        both.executors[1].detachFromDevice()
    both.check()


def test_a_copy_of_the_modules_is_as_trained() -> None:
    both = Wrapped(discriminate, generate)
    both.call(1, NOISE)
    both.call(0, REAL, NOISE)
    copies = copy.deepcopy(both.nets)
    for ours, theirs in zip(copies, both.plain, strict=True):
        torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def one_optimizer_for_two(library, inner: nn.Module, other: nn.Module):
    parameters = [*{*inner.parameters(), *other.parameters()}]
    optimizer = library.Adam(parameters, lr=0.05)
    return optimizer, [poptorch.trainingModel(m, options(), optimizer) for m in (inner, other)]


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
@pytest.mark.parametrize("common", [True, False], ids=["common weights", "own weights"])
def test_an_optimizer_of_two_models_is_said_where_they_would_disagree(
    library, common: bool, caplog
) -> None:
    inner = nets()[1]
    other = Outer(inner if common else nets()[1])
    optimizer, executors = one_optimizer_for_two(library, inner, other)
    args = torch.ones(2, 5), torch.ones(2, 1)
    if library is torch.optim:
        for executor in executors:  # in turns, it goes from one to the other
            executor(*args)
            executor.detachFromDevice()
        assert "in use by another training model" not in caplog.text
    for _ in range(2):
        for executor in executors:
            executor(*args)
    said = caplog.text.count("in use by another training model")
    assert said == (1 if common or library is poptorch.optim else 0)
    if library is torch.optim and not common:
        assert {float(entry["step"]) for entry in optimizer.state.values()} == {3.0}


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x, y):
        return F.l1_loss(self.inner(x), y)
