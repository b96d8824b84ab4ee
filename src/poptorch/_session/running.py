"""A call on the device that happens wholly, or leaves everything as after a whole update."""

from __future__ import annotations

import torch

from .. import _capture
from .._base import interrupts
from . import faults
from .live import Live
from .optimizer import SessionOptimizer
from .sync import Sync


def execute(
    live: Live, sync: Sync, optimizer: SessionOptimizer | None, batch: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Run the program on a batch that fits it; signals are handled where the state is whole.

    Raises:
        Error: an index among the inputs is out of range, or the processes of a job have written
            other weights to their devices; nothing has run.
    """
    device = sync.get_device()
    live.now.attributes.say()
    device.say_edits()
    live.now.indices.check(batch, device.state)
    sync.compare_written()
    if optimizer is not None and sync.looked_at:
        live.changes.say_gradients()
        sync.looked_at = False
    before, dirty = device.state.updates, sync.dirty
    with interrupts.deferred():
        if optimizer is not None:
            sync.dirty = True
        try:
            faults.check("run")
            with _capture.without_autocast():
                results = live.now.compiled.executable.run(device.state, batch)
        except BaseException as error:
            if device.state.updates == before:  # nothing has happened
                sync.dirty = dirty
            else:
                _ran(live, optimizer, device.state.updates - before)
            better = live.now.indices.explain(error, batch, device.state)
            if better is error:
                raise
            raise better from error
        _ran(live, optimizer, device.state.updates - before)
    return results


def _ran(live: Live, optimizer: SessionOptimizer | None, updates: int) -> None:
    live.random.ran()
    if optimizer is not None:
        optimizer.after_run(updates)
