"""Chips on devices: nothing that a chip computes with is anywhere else."""

import torch

import poptorch
from helpers.wrapping import Having, options
from poptorch._ir.blocks import Direction
from poptorch.backends import chips as chips_module
from poptorch.backends import staged as staged_module
from poptorch.backends.chips import Device, devices, synchronise
from poptorch.backends.prepare import at_home


def two_blocks(model: Having, x: torch.Tensor, y: torch.Tensor):
    """On two chips; makes tensors of its own."""
    with poptorch.Block("A", ipu_id=0):
        x = model.first(x) * model.scale + torch.ones(4)
    with poptorch.Block("B", ipu_id=1):
        out = model.second(x.relu()) + torch.arange(2.0)
        return out, torch.nn.functional.mse_loss(out, y)


def test_without_devices_chips_are_the_hosts_memory(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices(3) == [Device(torch.device("cpu"))] * 3
    synchronise(devices(3))
    module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    assert at_home(module, torch.device("cpu")) is module


class _Computed(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the devices of what operators get and make."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            if isinstance(leaf, torch.Tensor):
                self.devices.add(leaf.device.type)
        return result


def test_parts_compute_on_the_device_of_their_chip(monkeypatch) -> None:
    """A device without data takes part of the work; no operator may see two devices."""
    meta = torch.device("meta")
    monkeypatch.setattr(staged_module, "devices", lambda n: [Device(meta)] * n)
    # There is no data to give back.
    monkeypatch.setattr(chips_module.Replica, "give_back", lambda self, state: None)
    seen: dict[Direction, set[str]] = {}
    compute = chips_module.Replica._compute

    def watched(self, action, step, chip, batch):
        moved = self._modules[action.stage_pass]

        def run(*arguments):
            with _Computed() as computed:
                results = moved(*arguments)
            seen.setdefault(action.stage_pass.direction, set()).update(computed.devices)
            return results

        self._modules = {**self._modules, action.stage_pass: run}
        compute(self, action, step, chip, batch)
        self._modules = {**self._modules, action.stage_pass: moved}

    monkeypatch.setattr(chips_module.Replica, "_compute", watched)
    monkeypatch.setattr(staged_module.StagedExecutable, "_collected", lambda self, replicas: [])
    layers = {"first": torch.nn.Linear(4, 4), "second": torch.nn.Linear(4, 2)}
    model = Having(two_blocks, **layers, scale=torch.full((4,), 2.0))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    training = poptorch.trainingModel(model, options("staged", accumulation=4), optimizer)
    training.compile(torch.randn(8, 4), torch.randn(8, 2))
    executable = training._session.now.compiled.executable
    executable.run(training._session.weights.store.state, [torch.randn(8, 4), torch.randn(8, 2)])
    assert seen == {direction: {"meta"} for direction in Direction}
