"""Models whose update is traced from an optimizer's own ``step``, and copies in eager PyTorch."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer, lr_scheduler
from transformers.optimization import Adafactor as TransformersAdafactor

import poptorch
from helpers import traced_optimizers as own
from helpers.closeness import FUNCTION, near, relative
from helpers.wrapping import options

Make = Callable[[Any], Any]
Batch = tuple[torch.Tensor, torch.Tensor]

STEPS, ROWS = 20, 24  # rows: micro-batches of 4, accumulation 3, replicas 2
COUNTS = {"accumulation": 3, "replicas": 2}
ROUNDINGS = ROWS + 6 * FUNCTION


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.last(torch.tanh(self.first(x)))
        return scores, nn.functional.cross_entropy(scores, labels)


def of(cls: Callable[..., Any], **settings: Any) -> Make:
    """Return what makes an optimizer of two groups."""

    def make(model: nn.Module) -> Any:
        first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
        return cls([{"params": first}, {"params": rest, "lr": 0.02}], **settings)

    return make


def matrices_only(model: Net) -> Optimizer:
    groups = [{"params": [model.first.weight]}, {"params": [model.last.weight], "lr": 0.02}]
    return torch.optim.Muon(groups, lr=0.01)


def by_itself(model: nn.Module) -> Optimizer:
    """It takes no rate: it makes one from the number of the step and the size of the weight."""
    return TransformersAdafactor(model.parameters(), warmup_init=True)


def adam_with_tensors(model: nn.Module) -> Optimizer:
    """A schedule changes the rate in place, so each optimizer has its own tensors."""
    betas = torch.tensor(0.8), torch.tensor(0.99)
    adam: Optimizer = of(T.Adam, lr=torch.tensor(0.01), betas=betas)(model)
    return adam


def adamw_with_a_tensor(model: nn.Module) -> Optimizer:
    adamw: Optimizer = of(T.AdamW, lr=torch.tensor(0.01), amsgrad=True, maximize=True)(model)
    return adamw


T = torch.optim
IN_HALF: set[Make] = {matrices_only}  # make optimizers that compute in bfloat16
CASES: dict[str, Make] = {
    "Adadelta": of(T.Adadelta),
    "Adafactor": of(T.Adafactor, lr=0.01),
    "Adagrad": of(T.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam, amsgrad": of(T.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, tensors": adam_with_tensors,
    "AdamW, amsgrad": adamw_with_a_tensor,
    "Adamax": of(T.Adamax, lr=0.01, weight_decay=0.1),
    "ASGD": of(T.ASGD, lr=0.01, t0=5.0, lambd=0.01),
    "Muon": matrices_only,
    "NAdam": of(T.NAdam, lr=0.01, foreach=True, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": of(T.RAdam, lr=0.01),
    "RMSprop": of(T.RMSprop, lr=0.01, momentum=0.9),
    "Rprop": of(T.Rprop, lr=0.01),
    "SGD": of(T.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor of transformers": of(
        TransformersAdafactor, lr=0.01, relative_step=False, scale_parameter=False
    ),
    "Adafactor of transformers by itself": by_itself,
    "Lion": of(own.Lion, lr=0.01, weight_decay=0.1),
    "LARS": of(own.LARS, lr=0.1),
    "ScheduledAdam": of(own.ScheduledAdam, lr=0.01),
    "Lookahead": of(own.Lookahead, momentum=0.9),
    "CountingGroups": of(own.CountingGroups, lr=0.1),
    "OneNorm": of(own.OneNorm),
    "Nested": of(own.Nested, lr=0.01),
}


class Pair:
    """A model that is trained by a program, and its copy, which eager PyTorch trains."""

    def __init__(
        self, make: Make, backend: str = "reference", kind: Callable[[], Any] = Net
    ) -> None:
        torch.manual_seed(0)
        # Muon computes in bfloat16: five products one after another, and then steps of 0.02.
        halves = {"rtol": 0.0, "atol": 0.02 * relative(5, STEPS, torch.bfloat16)}
        self.bounds = halves if make in IN_HALF else near(ROUNDINGS, STEPS)
        self.model = kind()
        self.eager_model = copy.deepcopy(self.model)
        self.optimizer, self.eager_optimizer = make(self.model), make(self.eager_model)
        self.training = wrapped(self.model, self.optimizer, backend)
        self._generator = torch.Generator().manual_seed(1)

    def batch(self) -> Batch:
        x = torch.randn(ROWS, 6, generator=self._generator)
        return x, torch.randint(3, (ROWS,), generator=self._generator)

    def step(self, *others: Callable[[Batch], object]) -> None:
        """Make a step of both, and let others have the same batch."""
        batch = self.batch()
        self.training(*batch)
        step_eagerly(self.eager_model, self.eager_optimizer, batch)
        for other in others:
            other(batch)

    def steps(self, count: int, *others: Callable[[Batch], object]) -> None:
        for _ in range(count):
            self.step(*others)

    def assert_alike(self, model: nn.Module | None = None) -> None:
        got = (self.model if model is None else model).state_dict()
        torch.testing.assert_close(got, self.eager_model.state_dict(), **self.bounds)


def wrapped(
    model: nn.Module, optimizer: Any, backend: str = "reference"
) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(model, options(backend, **COUNTS), optimizer)


def step_eagerly(model: nn.Module, optimizer: Any, batch: Batch) -> None:
    optimizer.zero_grad()
    model(*batch)[1].backward()
    optimizer.step()


def state_of(optimizer: Any) -> dict[str, Any]:
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return state


def scheduled(optimizer: Any) -> lr_scheduler.LRScheduler | None:
    """Return a schedule, if the optimizer takes a rate."""
    if any(group["lr"] is None for group in optimizer.param_groups):
        return None
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


class History:
    """A pair that made twenty steps with a schedule, and what both had after some of them.

    Others may continue from there, with the batches of the later steps.
    """

    EARLY = 12

    def __init__(self, make: Make, backend: str = "reference") -> None:
        self.make, self.pair = make, Pair(make, backend)
        schedules = [scheduled(each) for each in (self.pair.optimizer, self.pair.eager_optimizer)]
        self.later: list[Batch] = []
        self._train(schedules, self.EARLY)
        self.ours = state_of(self.pair.optimizer)
        self.our_weights = copy.deepcopy(self.pair.model.state_dict())
        self.theirs = state_of(self.pair.eager_optimizer)
        self.their_weights = copy.deepcopy(self.pair.eager_model.state_dict())
        self._train(schedules, STEPS - self.EARLY, self.later.append)
        self.weights = copy.deepcopy(self.pair.model.state_dict())
        self.expected = self.pair.eager_model.state_dict()

    def _train(self, schedules: list[Any], count: int, *others: Callable[[Batch], object]) -> None:
        for _ in range(count):
            self.pair.step(*others)
            for schedule in filter(None, schedules):
                schedule.step()
            self.pair.training.setOptimizer(self.pair.optimizer)

    def weights_of_eager_torch_from_the_state_of_the_program(self) -> dict[str, Any]:
        model = copy.deepcopy(self.pair.eager_model)
        model.load_state_dict(self.our_weights)
        optimizer = self.make(model)
        optimizer.load_state_dict(self.ours)
        schedule = scheduled(optimizer)
        for batch in self.later:
            step_eagerly(model, optimizer, batch)
            if schedule is not None:
                schedule.step()
        return model.state_dict()

    def weights_of_a_program_from_the_state_of_eager_torch(self, backend: str) -> dict[str, Any]:
        model = copy.deepcopy(self.pair.eager_model)
        model.load_state_dict(self.their_weights)
        optimizer = self.make(model)
        optimizer.load_state_dict(self.theirs)
        return self._continued(wrapped(model, optimizer, backend), model, optimizer)

    def weights_of_the_running_program_from_the_state_of_eager_torch(self) -> dict[str, Any]:
        pair = self.pair
        pair.model.load_state_dict(self.their_weights)
        pair.training.copyWeightsToDevice()
        pair.optimizer.load_state_dict(self.theirs)
        pair.training.setOptimizer(pair.optimizer)
        return self._continued(pair.training, pair.model, pair.optimizer)

    def _continued(self, training: Any, model: Any, optimizer: Any) -> dict[str, Any]:
        schedule = scheduled(optimizer)
        for batch in self.later:
            training(*batch)
            if schedule is not None:
                schedule.step()
                training.setOptimizer(optimizer)
        state: dict[str, Any] = model.state_dict()
        return state

    def assert_as_expected(self, weights: dict[str, Any]) -> None:
        torch.testing.assert_close(weights, self.expected, **self.pair.bounds)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)


class StepByFunction(torch.optim.Optimizer):
    """Does to each weight what a function says."""

    def __init__(self, params: Any, function: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        self.function = function

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.function(p, group, self.state[p])  # that line


def step_by_function(function: Any, **defaults: Any) -> Make:
    def make(model: nn.Module) -> Any:
        return StepByFunction(model.parameters(), function, **defaults)

    return make
