"""The fused and the staged form of one captured model, run side by side."""

import copy
import functools

import torch

import poptorch
from helpers.captures import capture
from poptorch import _place
from poptorch._capture import Micro
from poptorch._compile.build import inference_program, training_program
from poptorch._compile.staged import stage
from poptorch._ir import verify
from poptorch._ir.plan import Plan
from poptorch._ir.program import Program, State
from poptorch._ir.slots import Kind
from poptorch._lanes import one_by_one
from poptorch.backends.reference import Reference
from poptorch.backends.staged import ByStages, StagedExecutable
from poptorch.optim.freeze import freeze as freeze_optimizer
from poptorch.options.freeze import freeze


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Captured:
    """A captured model, for plans of several strategies; each run starts from its values."""

    def __init__(self, module, inputs, optimizer=None) -> None:
        self.module = copy.deepcopy(module)
        self.training = optimizer is not None
        captured = functools.partial(capture, self.module, *inputs, training=self.training)
        self._captured = functools.cache(lambda replicas: captured(replicas=replicas))
        self.micro: Micro = self._captured(1)
        self.optim, self.hypers = None, {}
        if optimizer is not None:
            paths = {p.data_ptr(): name for name, p in self.module.named_parameters()}
            self.optim, self.hypers = freeze_optimizer(optimizer(self.module), paths)

    def plan(self, opts: poptorch.Options) -> Plan:
        """Return the plan for some options, staged form included."""
        spec = freeze(opts, self.training)
        micro = self._captured(spec.loops.replicas)
        layout = _place.place(one_by_one(micro.graph, spec.loops.replicas), micro.visits, spec)
        if self.optim is None:
            program = inference_program(layout.graph, spec, None)
        else:
            program = training_program(layout.graph, spec, self.optim, None)
        return Plan(program, spec, layout, stage(layout, spec, self.optim))

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
        executable = ByStages().compile(plan, lambda _: None)
        assert isinstance(executable, StagedExecutable)
        return *self._run(plan, executable, batches), executable

    def _run(self, plan: Plan, executable, batches: list) -> tuple[list, list[State]]:
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
                ours.tensors[key], theirs.tensors[key], **tolerances,
                msg=lambda m, key=key: f"{key}: {m}",
            )  # fmt: skip
