"""Public methods in any order, compared with an eager model that does what they document."""

import copy
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.wrapping import Graded, options

from .models import close

COMPILED = (8, 16, 24)  # of the first thousand, whose others the interpreter runs; later, each 4th
OPTIMIZERS = [
    lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
]


class Doubled(torch.nn.Linear):
    """Compiled inference prepares its weights; a program for ``eval()`` does not count."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.add_(1)
        return torch.nn.functional.linear(x, self.weight * 2, self.bias)


class Subject:
    """A wrapped model, and what its host and its device should have."""

    def __init__(self, number: int) -> None:
        self.draw = draw = random.Random(number)
        torch.manual_seed(draw.randrange(1000))
        self.accumulation = draw.choice([1, 1, 2])
        statistics, make = draw.random() < 0.3, draw.choice(OPTIMIZERS)
        norm = torch.nn.BatchNorm1d(4) if statistics else torch.nn.Tanh()
        self.model = Graded(both=True, norm=norm, layer=Doubled(4, 2))
        self.held = self.model.layer.weight
        self.eager = copy.deepcopy(self.model)  # as the device should be
        self.optimizer, self.eagers = make(self.model), make(self.eager)
        compiled = number in COMPILED or (number >= 1000 and number % 4 == 0)
        backend = "inductor" if compiled else "reference"
        opts = options(backend, accumulation=self.accumulation)
        self.trainer = poptorch.trainingModel(self.model, opts, self.optimizer)
        wrapped = poptorch.inferenceModel(self.model, options(backend))
        self.inference = wrapped if not statistics else None
        # Of the host, old while the device is newer; of the inference model, once it was called.
        self.host, self.seen = values(self.eager), None
        self.compiled = self.attached = self.newer = self.downloaded = False

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(4 * self.accumulation, 4), torch.randn(4 * self.accumulation, 2)

    def to_host(self) -> None:
        self.host, self.newer, self.downloaded = values(self.eager), False, True

    def read(self) -> None:
        if self.newer:
            self.to_host()

    def attach(self) -> None:
        self.eager.load_state_dict(self.host)
        self.compiled = self.attached = True

    # What may be done; each returns what should be equal.

    def call(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if not self.attached:
            self.attach()
        x, y = self.batch()
        out, loss = self.trainer(x, y)
        self.newer = True
        expected, expected_loss = stepped(self.eager, self.eagers, x, y, self.accumulation)
        return [(out, expected), (loss, expected_loss)]

    def state_dict(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.read()
        got = self.draw.choice([self.trainer, self.model]).state_dict()
        return [(got[name], self.host[name]) for name in self.host]

    def read_held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        self.read()
        return [(self.held.clone(), self.host["layer.weight"])]

    def optimizer_state(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        got, expected_values = (
            each.state_dict()["state"] for each in (self.optimizer, self.eagers)
        )
        if not expected_values:  # torch has none before the first step; what was detached has zeros
            numbers = [torch.as_tensor(v).float() for each in got.values() for v in each.values()]
            return [(each, torch.zeros_like(each)) for each in numbers]
        assert got.keys() == expected_values.keys(), (got.keys(), expected_values.keys())
        pairs = [
            (got[at][name], v) for at, state in expected_values.items() for name, v in state.items()
        ]
        return [(torch.as_tensor(a).float(), torch.as_tensor(b).float()) for a, b in pairs]

    def edit(self) -> None:
        self.read()
        with torch.no_grad():
            self.draw.choice([self.held, self.trainer.layer.weight]).add_(0.125)
        self.host["layer.weight"] = self.host["layer.weight"] + 0.125

    def rebind(self) -> None:
        self.read()
        self.host["layer.weight"] = self.host["layer.weight"] - 0.0625
        self.model.layer.weight.data = self.host["layer.weight"].clone()

    def load_state_dict(self) -> None:
        self.read()
        self.host = {
            name: each + 0.0625 if each.is_floating_point() else each + 1
            for name, each in self.host.items()
        }
        self.trainer.load_state_dict(self.host)
        if self.attached:
            self.eager.load_state_dict(self.host)

    def copy_weights_to_device(self) -> None:
        if refused(self.trainer.copyWeightsToDevice, not self.compiled) or not self.attached:
            return
        self.newer = False
        self.eager.load_state_dict(self.host)

    def copy_weights_to_host(self) -> None:
        if not refused(self.trainer.copyWeightsToHost, not self.compiled) and self.attached:
            self.to_host()

    def set_optimizer(self) -> None:
        rate = self.draw.choice([0.02, 0.05, 0.1])
        for each in (self.optimizer, self.eagers):
            each.param_groups[0]["lr"] = rate
        self.trainer.setOptimizer(self.optimizer)

    def change_mode(self) -> None:
        self.state_dict()  # a program for another mode may bring the host up to date
        training = self.draw.random() < 0.5
        self.draw.choice([self.trainer, self.model]).train(training)
        self.eager.train(training)

    def compile(self) -> None:
        self.trainer.compile(*self.batch())
        if not self.compiled:
            self.attach()

    def detach(self) -> None:
        if not refused(self.trainer.detachFromDevice, not self.attached):
            self.read()
            self.attached = False

    def attach_to_device(self) -> None:
        if not refused(self.trainer.attachToDevice, self.attached or not self.compiled):
            self.attach()

    def destroy(self) -> None:
        self.trainer.destroy()
        self.read()
        self.compiled = self.attached = False

    def fork(self) -> None:
        if not self.compiled:
            return
        if not (child := os.fork()):
            try:
                os._exit(not refused(lambda: self.trainer(*self.batch()), True))
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def infer(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if self.inference is None:
            return []
        self.read()
        if self.seen is None or self.downloaded:
            self.seen, self.downloaded = dict(self.host), False
        x, y = self.batch()
        eager_model = copy.deepcopy(self.eager)
        eager_model.load_state_dict(self.seen)
        with torch.no_grad():
            return list(zip(self.inference(x[:4], y[:4]), eager_model(x[:4], y[:4]), strict=True))

    def save_and_load(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.poptorch")
            if refused(lambda: self.trainer.save(path), not self.compiled):
                return []
            self.read()
            second = poptorch.load(path)
        eager_model = copy.deepcopy(self.eager)
        eager_model.load_state_dict(self.host)
        optimizer = type(self.eagers)(eager_model.parameters(), lr=0.5)
        optimizer.load_state_dict(copy.deepcopy(self.eagers.state_dict()))
        second.train(self.eager.training)
        x, y = self.batch()
        got, expected_values = (
            second(x, y),
            stepped(eager_model, optimizer, x, y, self.accumulation),
        )
        state = second.state_dict()
        second.destroy()
        states = ((state[name], each) for name, each in eager_model.state_dict().items())
        return [*zip(got, expected_values, strict=True), *states]


ACTIONS = [
    Subject.call,
    Subject.call,
    Subject.call,
    Subject.state_dict,
    Subject.optimizer_state,
    Subject.read_held,
    Subject.edit,
    Subject.load_state_dict,
    Subject.copy_weights_to_device,
    Subject.copy_weights_to_host,
    Subject.set_optimizer,
    Subject.change_mode,
    Subject.compile,
    Subject.detach,
    Subject.attach_to_device,
    Subject.destroy,
    Subject.infer,
    Subject.save_and_load,
    Subject.rebind,
    Subject.fork,
]


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.clone() for name, each in model.state_dict().items()}


def stepped(
    model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor, parts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Train eagerly; return what the last micro-batch gave, as poptorch does by default."""
    optimizer.zero_grad()
    for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
        out, loss = model(some, labels)
        (loss / parts).backward()
    optimizer.step()
    return out.detach(), loss.detach()


def refused(method: Callable[..., Any], wrong: bool) -> bool:
    """Call a method that must be refused if it is wrong now; return whether it was."""
    try:
        method()
    except poptorch.Error:
        if not wrong:
            raise
        return True
    assert not wrong, f"{method} was not refused"
    return False


def trial(number: int) -> Iterator[Any]:
    subject = Subject(number)
    order = [subject.draw.choice(ACTIONS) for _ in range(14)]
    order += [Subject.call, Subject.state_dict, Subject.optimizer_state]
    done: list[str] = []
    for action in order:
        done.append(action.__name__)
        try:
            if subject.draw.random() < 0.8:
                pairs = action(subject) or []
            else:
                with ThreadPoolExecutor(1) as threads:
                    pairs = threads.submit(action, subject).result() or []
        except Exception as error:
            yield "exception", f"{', '.join(done)}: {type(error).__name__}: {str(error)[:300]}"
            break
        wrong = [at for at, pair in enumerate(pairs) if not close(*pair)]
        if wrong:
            yield "other numbers than eager", f"{', '.join(done)}: {wrong} of {len(pairs)} values"
            break
    else:
        yield "right", None
    subject.trainer.destroy()
    if subject.inference is not None:
        subject.inference.destroy()
