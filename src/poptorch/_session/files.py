"""Executables in files: saving one, reading one, putting it into a session.

A file holds the plan as JSON, tensors as safetensors, the user's objects as a restricted pickle
(see ``pickles``), and compiled code as the backend keeps it. Nothing in it runs when it is read;
the code, which would, is only taken from files that the user trusts.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from .. import _compile, backends
from .._base import archive, log, trees
from .._base.errors import AssertionFailure, Error
from .._compile import serial
from .._ir import verify
from .._ir.optim_spec import OptimSpec
from .._ir.plan import Plan
from .._ir.slot import Kind
from .._ir.spec import Spec
from ..enums import ConnectionType
from ..optim.replacement import check_replacement
from . import pickles
from .arguments import Bound, Inputs
from .session import Session

DEFAULT_NAME = "model.poptorch"
_CODE = "code/"


@dataclass(frozen=True, eq=False)
class Saved:
    """What a file holds.

    Attributes:
        plan: the program.
        optim: the optimizer's compiled structure, None in inference.
        inputs: (shape, dtype) of every tensor argument, and (parameter, structure).
        outputs: the structure that forward returned.
        hosts: returned tensors that forward did not compute.
        names: of tensors that can be anchored.
        constants: first values of the program's constants, by key.
        device: state that no host tensor mirrors, by key; empty without the model.
        random: the random state, None if it was not saved.
        objects: the user's: ``options`` and, if the model was exported, ``model``, ``optimizer``
            and ``loss``.
        code: of the program's graphs, by key; empty unless the file is trusted.
    """

    plan: Plan
    optim: OptimSpec | None
    inputs: tuple[list[tuple[tuple[int, ...], torch.dtype]], tuple[tuple[str, Any], ...]]
    outputs: trees.Structure
    hosts: Mapping[int, torch.Tensor]
    names: tuple[str, ...]
    constants: Mapping[str, torch.Tensor]
    device: Mapping[str, torch.Tensor]
    random: list[int] | None
    objects: Mapping[str, Any]
    code: Mapping[str, bytes]


def destination(filename: str | os.PathLike[str]) -> Path:
    """Return where to save, creating missing folders.

    Raises:
        AssertionFailure: a folder on the way is a file.
    """
    path = Path(filename)
    if path.is_dir():
        log.python.warning("%s is a directory: saving to %s in it", path, DEFAULT_NAME)
        return path / DEFAULT_NAME
    for parent in path.parents:
        if parent.exists() and not parent.is_dir():
            raise AssertionFailure("Cannot save in a folder that is a file", got=str(parent))
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def save(
    session: Session,
    filename: str | os.PathLike[str],
    objects: Mapping[str, Any],
    with_state: bool,
    with_random: bool,
) -> None:
    """Save the executable of a session, and objects of the user's beside it.

    Args:
        with_state: keep the device's own state: moments and counters of the optimizer.
        with_random: keep the random state.

    Raises:
        Error: not compiled.
        AssertionFailure: the path leads through a file.
    """
    session.sync.check_compiled()
    compiled, inputs = session.compiled, session.inputs
    assert compiled is not None
    assert inputs is not None
    path = destination(filename)
    session.sync.bring_host_up_to_date()
    optim = session.seat.spec if session.seat is not None else None
    parts = {
        "parts": inputs.bound.parts,
        "outputs": compiled.outputs,
        "hosts": dict(compiled.host_outputs),
        "objects": dict(objects),
    }
    pickled, tensors = pickles.dump(parts)
    stored = {f"object.{name}": value for name, value in tensors.items()}
    stored |= {f"state.{key}": value for key, value in compiled.constants.items()}
    if with_state:
        stored |= {f"device.{key}": value for key, value in session.restorable.items()}
    facts = {
        "plan": serial.encode(compiled.plan),
        "optim": serial.encode(optim),
        "names": list(compiled.names),
        "inputs": [serial.encode((tuple(t.shape), t.dtype)) for t in inputs.bound.tensors],
        "random": session.rng_state if with_random else None,
    }
    archive.write(
        path,
        {
            "facts.json": json.dumps(facts).encode(),
            "tensors.safetensors": _tensor_bytes(stored),
            "objects.pickle": pickled,
            **{f"{_CODE}{key}": code for key, code in _code_of(compiled.plan).items()},
        },
    )


def _code_of(plan: Plan) -> dict[str, bytes]:
    backend = backends.choose(plan.spec.target.backend)
    if not isinstance(backend, backends.Builder):
        return {}
    return _compile.Code(plan, backend, _compile.store_of(plan.spec.runtime.cache_dir)).kept()


def _tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    # Storage may be shared by several of them, which the format refuses.
    return safetensors.torch.save({k: t.detach().clone().contiguous() for k, t in tensors.items()})


def read(filename: str | os.PathLike[str], trusted: bool = False) -> Saved:
    """Read a file without running anything in it.

    Raises:
        FileNotFoundError: there is none.
        InvalidFile: damaged, of another version, or with objects that are not allowed.
    """
    parts = archive.read(filename)
    try:
        facts = json.loads(parts["facts.json"])
        tensors = safetensors.torch.load(parts["tensors.safetensors"])
        plan: Plan = serial.decode(facts["plan"])
        verify.verify_plan(plan)
        groups: dict[str, dict[str, torch.Tensor]] = {"object": {}, "state": {}, "device": {}}
        for name, tensor in tensors.items():
            group, _, key = name.partition(".")
            groups[group][key] = tensor
        optim = serial.decode(facts["optim"])
        shapes = [serial.decode(entry) for entry in facts["inputs"]]
        pickled = parts["objects.pickle"]
    except (archive.InvalidFile, serial.Unreadable):
        raise
    except Exception as error:
        archive.refuse(filename, f"{type(error).__name__}: {error}")
    content = pickles.load(pickled, groups["object"], trusted)
    return Saved(
        plan,
        optim,
        (shapes, content["parts"]),
        content["outputs"],
        content["hosts"],
        tuple(facts["names"]),
        groups["state"],
        groups["device"],
        facts["random"],
        content["objects"],
        {k.removeprefix(_CODE): v for k, v in parts.items() if trusted and k.startswith(_CODE)},
    )


def install(session: Session, saved: Saved, spec: Spec, whole: bool) -> None:
    """Let a session use a saved executable instead of compiling.

    Args:
        spec: what the session's options say now; its run-time settings count, while what was
            compiled in is the file's.
        whole: continue with the saved optimizer and random state too, not with the program only.

    Raises:
        Error: the file belongs to another model, or the optimizer does not fit.
    """
    target = replace(saved.plan.spec.target, seed=spec.target.seed, device=spec.target.device)
    plan = replace(saved.plan, spec=replace(saved.plan.spec, target=target, runtime=spec.runtime))
    session.read_module(plan.spec)
    _check_model(session, plan)
    optim, values = session.frozen_optimizer(plan.spec)
    if (optim is None) != (saved.optim is None):
        raise Error("Invalid file: a training executable needs trainingModel, and the reverse")
    if optim is not None and saved.optim is not None:
        check_replacement(saved.optim, optim)
    backend = backends.choose(plan.spec.target.backend)
    if plan.spec.precision.floating_point_exceptions:
        backend = backends.checking(backend)
    store = _compile.store_of(plan.spec.runtime.cache_dir)
    for key, code in saved.code.items():
        store.keep(key, code)
    executable = _compile.compile_plan(
        backend,
        plan,
        store,
        background=plan.spec.target.backend == backends.AUTO,
        progress=lambda share: None,
    )
    shapes, structures = saved.inputs
    examples = [torch.zeros((), dtype=dtype).expand(shape) for shape, dtype in shapes]
    narrow = plan.spec.precision.narrow_64bit
    inputs = Inputs(Bound(examples, structures), plan.spec.loops, narrow)
    compiled = _compile.Compiled(
        plan, executable, saved.constants, saved.outputs, saved.hosts, saved.names
    )
    session.install(plan.spec, compiled, inputs, saved.optim, values)
    if whole:
        session.restorable = saved.device
        session.random.set(saved.random, None)
    if plan.spec.runtime.connection != ConnectionType.Never:
        session.attach()


def _check_model(session: Session, plan: Plan) -> None:
    shapes = session.state_shapes()
    for slot in plan.program.visible_slots().values():
        if slot.kind not in (Kind.PARAM, Kind.BUFFER):
            continue
        if shapes.get(slot.path) != slot.replica_shape:
            raise Error(
                "Invalid file: it was saved from another model",
                got=f"{slot.path}: {slot.shape} in the file, {shapes.get(slot.path)} in the model",
            )
