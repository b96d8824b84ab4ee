"""Export the program of a wrapped model as files of plain PyTorch, or as a page for browsers."""

from __future__ import annotations

import os
from pathlib import Path

import safetensors.torch

from ... import _compile, _export
from ..._base import safe_files, source
from ..._base.errors import Error
from ..._ipu_model.estimate import Estimate
from ..calls import Arguments
from ..programs import Specialization
from ..session import Session
from .saved_model import check_folder


def check_export(filename: str | os.PathLike[str]) -> Path:
    path = Path(filename)
    check_folder(path)
    if path.is_dir() or path.suffix not in (".py", ".html"):
        reason = "it is a folder" if path.is_dir() else f"its suffix is '{path.suffix}'"
        raise Error(
            "The name of an exported file must end in .py or .html",
            got=f"{path}: {reason}",
            fix="use step.py for Python code, or step.html for a page for a browser",
        )
    return path


def export(session: Session, filename: str | os.PathLike[str]) -> None:
    """Write the program as Python together with a file of its tensors, or write it as a page."""
    path = check_export(filename)
    with session.lock():
        now = session.now
        name = type(session.model.module).__name__.removeprefix("Poptorch")
        with source.excluding(now.spec.runtime.source_excludes):
            write = _write_page if path.suffix == ".html" else _write_python
            write(session, now, name, path)


def _write_python(session: Session, now: Specialization, name: str, path: Path) -> None:
    if session.weights.store is None:
        session.attach()
    session.weights.fetch()
    example = now.inputs.example()
    plan = _compile.for_one_size(now.compiled.plan, now.inputs.slots())
    text = _export.text_of(plan, name, now.inputs.bound.paths)
    state = session.weights.attached.state
    tensors, more = _export.tensors_of(plan, state, example)
    path.parent.mkdir(parents=True, exist_ok=True)
    weights = safe_files.followed(path.with_suffix(".safetensors"))
    safetensors.torch.save_file(tensors, weights, more)
    safe_files.write_text_for_user(path, text)


def _write_page(session: Session, now: Specialization, name: str, path: Path) -> None:
    modules = session.model.module.named_modules()
    kinds = {p: type(module).__name__.removeprefix("Poptorch") for p, module in modules}
    price: Estimate | str
    try:
        price = session.reports.priced(now)
    # for example, because replicas exchange tensors; the page shows the reason
    except Error as error:
        price = error.message
    text = _export.html(now.plan(), name, now.inputs.bound.paths, kinds, price)
    path.parent.mkdir(parents=True, exist_ok=True)
    safe_files.write_text_for_user(path, text)


def export_for(session: Session, arguments: Arguments, *files: Path) -> None:
    """Compile for some arguments, but only as far as needed for an export, and export."""
    with session.lock():
        session.compile(arguments, background=True)
        for file in files:
            export(session, file)
