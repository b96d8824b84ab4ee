"""The fused and the staged form of one captured model, side by side; models in blocks b0 to bn."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import poptorch
from helpers.captures import request_of
from poptorch import _capture
from poptorch._capture import Micro
from poptorch._compile import passes
from poptorch._compile.compilation import Compilation
from poptorch._compile.eager_check_policy import EagerCheck
from poptorch._ir import verify
from poptorch._ir.plan import Plan
from poptorch._ir.program import Program, State
from poptorch._ir.slots import Kind
from poptorch.backends.reference import Reference
from poptorch.backends.staged import StagedBackend, StagedExecutable
from poptorch.optim.freeze_optimizer import freeze as freeze_optimizer
from poptorch.options.freeze_options import freeze


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Captured:
    """A captured model, for plans of several strategies; each run starts from its values."""

    def __init__(
        self,
        module: nn.Module,
        inputs: tuple[torch.Tensor, ...],
        optimizer: Callable[..., Any] | None = None,
    ) -> None:
        self.module = copy.deepcopy(module)
        self.training = optimizer is not None
        request = functools.partial(request_of, self.module, *inputs, training=self.training)
        self._request = functools.cache(lambda replicas: request(replicas=replicas))
        self._captured = functools.cache(lambda n: _capture.capture(self._request(n)))
        self.micro: Micro = self._captured(1)
        self.optim, self.hypers = None, {}
        if optimizer is not None:
            paths = {p.data_ptr(): name for name, p in self.module.named_parameters()}
            self.optim, self.hypers = freeze_optimizer(optimizer(self.module), paths)

    def plan(self, opts: poptorch.Options) -> Plan:
        """Return the plan for some options, staged form included."""
        spec = freeze(opts, self.training)
        request, micro = (make(spec.loops.replicas) for make in (self._request, self._captured))
        unchecked = EagerCheck.off(request)
        start = Compilation(request, spec, self.optim, True, unchecked, micro=micro)
        staged = passes.run(start, stop="schedule")
        return passes.run(staged, stop="build").plan()

    def state(self, plan: Plan) -> State:
        """Return the device's tensors as they are before the first call."""
        values = self.module.state_dict(keep_vars=True)
        state = State(rng=torch.Generator().manual_seed(5).get_state())
        for key, slot in plan.program.state_slots().items():
            first = plan.program.initial.get(key, self.hypers.get(key, 0.0))
            state.tensors[key] = torch.full(slot.device_shape, first, dtype=slot.dtype)
            if slot.kind in (Kind.PARAM, Kind.BUFFER):
                state.write(key, values[slot.path])
            elif slot.kind is Kind.CONSTANT:
                state.write(key, self.micro.constants[key])
        verify.verify_state(state, plan.program)
        return state

    def run_fused(self, plan: Plan, batches: list) -> tuple[list, list[State]]:
        """Run calls on the reference backend; return the results and the state after each."""
        return self._run(plan, Reference().compile(plan, lambda _: None), batches)

    def run_staged(self, plan: Plan, batches: list) -> tuple[list, list[State], StagedExecutable]:
        """Run calls part by part; return also what did it."""
        executable = StagedBackend().compile(plan, lambda _: None)
        assert isinstance(executable, StagedExecutable)
        return *self._run(plan, executable, batches), executable

    def _run(
        self, plan: Plan, executable: StagedExecutable, batches: list
    ) -> tuple[list, list[State]]:
        state, results, states = self.state(plan), [], []
        for batch in batches:
            results.append(executable.run(state, [part.clone() for part in batch]))
            states.append(copy.deepcopy(state))
        return results, states


def assert_same_states(ours: State, theirs: State, program: Program, **tolerances: float) -> None:
    """Compare everything on the device but accumulators, which are empty between calls."""
    for key in program.state_slots():
        if not key.startswith(f"{Kind.ACCUM}."):
            torch.testing.assert_close(
                ours.tensors[key],
                theirs.tensors[key],
                **tolerances,
                msg=lambda m, key=key: f"{key}: {m}",
            )


ROWS = 2
WIDTH = 4


class Staged(nn.Module):
    """Runs its layers one by one, each in a block of its own; the loss is in the last block."""

    def __init__(self, blocks: int, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(blocks))
        self.chips = list(range(blocks))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.run(x)
        return x, nn.functional.mse_loss(x, y)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x)
        return x


def mlp_layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def conv_layer() -> nn.Module:
    """A convolution without bias before a batch norm, whose statistics must stay in order."""
    return nn.Sequential(nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU())


def transformer_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)


class Skip(Staged):
    """The first block's result is read by all others."""

    def run(self, x: torch.Tensor) -> torch.Tensor:
        first = None
        for number, layer in enumerate(self.layers):
            poptorch.Block.start(f"b{number}", self.chips[number])
            x = layer(x) if first is None else layer(x) + first.sin()
            first = x if first is None else first
        return x


class Tied(Staged):
    """The first and the last block share the embedding, so that they must be on one device."""

    def __init__(self, blocks: int) -> None:
        super().__init__(blocks, mlp_layer)
        self.table = nn.Embedding(7, WIDTH)

    def forward(self, tokens: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        poptorch.Block.start("b0", 0)
        x = self.run(self.table(tokens).mean(1))
        return x, nn.functional.cross_entropy(x @ self.table.weight.t(), y)


@dataclass(frozen=True)
class Example:
    """A model of n blocks, inputs for a number of rows, and the device of each block."""

    build: Callable[[int], nn.Module]
    inputs: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    chips: Callable[[int], list[int]] = lambda n: list(range(n))


def _normal(*shape: int) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    return lambda rows: (torch.randn(rows, *shape), torch.randn(rows, *shape))


STAGE_ZOO = {
    "mlp": Example(lambda n: Staged(n, mlp_layer), _normal(WIDTH)),
    "conv_net": Example(lambda n: Staged(n, conv_layer), _normal(2, 5, 5)),
    "transformer": Example(lambda n: Staged(n, transformer_layer), _normal(3, 4)),
    "skip": Example(lambda n: Skip(n, mlp_layer), _normal(WIDTH)),
    "tied": Example(
        Tied,
        lambda rows: (torch.randint(0, 7, (rows, 3)), torch.randint(0, 7, (rows,))),
        lambda n: [*range(n - 1), 0],
    ),
}
