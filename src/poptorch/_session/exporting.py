"""A wrapped model's program and its state as files of plain PyTorch."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch

from .. import _export
from .session import Session
from .signature import Arguments


def export(session: Session, filename: str | os.PathLike[str]) -> None:
    """Write the program as Python, and beside it what it works on."""
    path = Path(filename)
    with session.lock():
        now = session.now
        if session.weights.store is None:
            session.attach()
        session.weights.fetch()
        plan = now.compiled.plan
        name = type(session.model.module).__name__.removeprefix("Poptorch")
        text = _export.text_of(plan, name, now.inputs.bound.paths)
        state = session.weights.attached.state
        tensors, more = _export.tensors_of(plan, state, now.inputs.example())
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, path.with_suffix(".safetensors"), more)
    path.write_text(text)


def export_for(session: Session, arguments: Arguments, filename: str | os.PathLike[str]) -> None:
    """Compile for some arguments only as far as that takes, and export."""
    with session.lock():
        session.compile(arguments, background=True)
        export(session, filename)
