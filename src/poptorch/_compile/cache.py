"""Executables on disk: found by what they were compiled from, so that nothing compiles twice.

One file per executable, ``<key>.popef``; the key is a digest of the plan without what may change
from run to run, and of the versions that made it. It says what the key depends on; the compiled
graphs are files of their own beside it. Several processes may share a directory: the first compiles
under a lock, the others wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .._base import archive, log, trees
from .._base.folders import of_the_process, trouble
from .._base.version import VERSION
from .._base.visible import visible
from .._ir.plan import Plan
from .._ir.slots import Kind, Slot
from ..backends import Executable
from . import serial
from .code import SUFFIX as CODE_SUFFIX
from .code import Store, alone, default_store, warn

SUFFIX = ".popef"
CODE = "code"  # the folder of compiled graphs beside them
NEAREST_OF = 50  # entries that a miss is compared with, the latest ones
_FACTS, _HEADLINE = "facts.json", "headline.txt"
Facts = dict[str, str]


@dataclass(frozen=True)
class Entry:
    """One file of the cache.

    Attributes:
        path: the file.
        facts: everything that its key depends on, readable.
        headline: what it computes: training or inference, and the shapes of its inputs.
        size: bytes.
        used: when it was last written or found, in seconds since the epoch.
    """

    path: Path
    facts: Facts
    headline: str
    size: int
    used: float

    @property
    def key(self) -> str:
        """The digest that it is found by."""
        return self.path.stem


def compile_or_find(
    backend: str,
    plan: Plan,
    arguments: Mapping[str, trees.Structure],
    directory: str | None,
    build: Callable[[Store], Executable],
) -> Executable:
    """Compile a plan with the compiled graphs of a cache, and note in it what was compiled.

    Whatever is wrong with the folder or a file in it is a warning, and the program is compiled.

    Args:
        backend: name of what compiles.
        plan: what is compiled.
        arguments: their structures by parameter, to say which constant differs.
        directory: of the cache; None for none.
        build: compiles, with the graphs of a store.
    """
    if directory is None:
        return build(default_store())
    folder = Path(directory)
    if not folder.exists():
        log.engine.warning("Specified directory not found. Creating %s", folder)
    why = trouble(folder) or trouble(folder / CODE)
    if why is not None:
        return build(Store(of_the_process(f"executable cache {folder}: {why}")))
    path = folder / f"{key_of(plan, backend)}{SUFFIX}"
    with alone(path.with_suffix(".lock")):
        is_known = _is_known(path)
        facts = {} if is_known else facts_of(plan, backend, arguments)
        if not is_known:
            log.engine.info("Executable cache: miss, %s: %s", path.name, _miss(folder, facts))
        executable = build(Store(folder / CODE))
        if not is_known:
            _note(path, facts, _headline(plan))
    return executable


def _is_known(path: Path) -> bool:
    """Look for the entry of a plan."""
    try:
        archive.read(path)
        os.utime(path)
    except FileNotFoundError:
        return False
    except (archive.InvalidFile, OSError) as error:
        why = error.message if isinstance(error, archive.InvalidFile) else error
        log.engine.warning("Executable cache: %s is rebuilt. %s", path.name, why)
        return False
    log.engine.info("Executable cache: hit, %s", path)
    return True


def _headline(plan: Plan) -> str:
    slots = {s.index: s for graph in plan.program.graphs.values() for s in graph.inputs
             if s.kind is Kind.BATCH}  # fmt: skip
    inputs = " ".join(_shape_text(slots[index]) for index in sorted(slots))
    return f"{'training' if plan.spec.training else 'inference'}  {inputs}"


def _note(path: Path, facts: Facts, headline: str) -> None:
    parts = {_FACTS: json.dumps(facts).encode(), _HEADLINE: headline.encode()}
    try:
        archive.write(path, parts)
    except OSError as error:
        warn("Executable cache: nothing is noted in %s: %s", path.parent, error)


def store_of(directory: str | None) -> Store:
    """Return where the compiled graphs of a cache are, or of none."""
    return default_store() if directory is None else Store(Path(directory) / CODE)


def key_of(plan: Plan, backend: str) -> str:
    """Return the digest of everything that an executable depends on."""
    content = serial.encode(replace(plan, spec=plan.spec.for_cache()))
    _drop_lines(content)
    text = json.dumps([content, _versions(backend)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _drop_lines(content: Any) -> None:
    """Forget where the user's code stands: moving it changes nothing."""
    if isinstance(content, dict):
        content.pop("at", None)
        for value in content.values():
            _drop_lines(value)
    elif isinstance(content, list):
        for value in content:
            _drop_lines(value)


def _versions(backend: str) -> Facts:
    return {
        "backend": backend,
        "machine": platform.machine(),
        "poptorch": VERSION,
        "torch": torch.__version__,
    }


def facts_of(plan: Plan, backend: str, arguments: Mapping[str, trees.Structure]) -> Facts:
    """Return what a key depends on, in words: settings, shapes, constants, operators by line."""
    facts = {**_versions(backend), **flat_fields(plan.spec.for_cache())}
    for name, structure in arguments.items():
        facts |= {f"constant {path}": repr(value) for path, value in structure.constants}
        facts |= {f"type of {name}": type(structure.root).__name__.strip("_").lower()}
    slots = {s.key: s for graph in plan.program.graphs.values() for s in graph.inputs}
    for slot in slots.values():
        if slot.kind in (Kind.BATCH, Kind.PARAM, Kind.BUFFER, Kind.OPTSTATE):
            facts[slot.key] = _shape_text(slot)
    for name, graph in plan.program.graphs.items():
        nodes = serial.encode(graph)["nodes"]
        for at, node in enumerate(node for node in nodes if node["op"] == "call_function"):
            where = f" at {node['at']}" if "at" in node else ""
            text = json.dumps([node["args"], node.get("kwargs")])
            digest = hashlib.sha256(text.encode()).hexdigest()[:6]
            facts[f"{name} operator {at}"] = f"{node['target']} ({digest}){where}"
    return facts


def _shape_text(slot: Slot) -> str:
    return f"{str(slot.dtype).removeprefix('torch.')}[{', '.join(map(str, slot.shape))}]"


def flat_fields(value: Any, prefix: str = "") -> Facts:
    """Return the fields of nested frozen values as text, by dotted name."""
    facts: Facts = {}
    for field in fields(value):
        name, inner = f"{prefix}{field.name}", getattr(value, field.name)
        if is_dataclass(inner):
            facts |= flat_fields(inner, f"{name}.")
        else:
            facts[name] = str(inner)
    return facts


def entries(folder: Path) -> list[Entry]:
    """Return the whole entries of a directory, the latest first."""
    whole = []
    for path in folder.glob(f"*{SUFFIX}"):
        try:
            parts = archive.read(path)
            facts, headline = _facts(parts[_FACTS]), visible(parts[_HEADLINE].decode())
            status = path.stat()
        except (archive.InvalidFile, OSError, KeyError, ValueError, RecursionError):
            continue  # damaged, or just being removed: no entry
        whole.append(Entry(path, facts, headline, status.st_size, status.st_mtime))
    return sorted(whole, key=lambda entry: entry.used, reverse=True)


def _facts(data: bytes) -> Facts:
    """Return the facts of an entry, which anybody may have written.

    Raises:
        ValueError: they are no texts by name.
    """
    facts = archive.from_json(data)
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise ValueError("no texts by name")
    return {visible(name): visible(text) for name, text in facts.items()}


def differences(here: Facts, there: Facts) -> list[str]:
    """Return what differs, in words; of operators only the first of each graph."""
    lines, graphs = [], set()
    for name in sorted({*here, *there}, key=_order):
        if here.get(name) == there.get(name):
            continue
        graph, _, operator = name.partition(" operator ")
        if operator:
            if graph in graphs or _operator(here, name) == _operator(there, name):
                continue
            graphs.add(graph)
        lines.append(f"{name}: {here.get(name, 'absent')} here, {there.get(name, 'absent')} there")
    return lines


def _order(name: str) -> tuple[bool, str, str]:
    graph, _, operator = name.partition(" operator ")
    return bool(operator), graph, operator.zfill(9)  # by number, and whatever else stands there


def _operator(facts: Facts, name: str) -> str:
    return facts.get(name, "").partition(" at ")[0]  # where it stands makes no difference


def _miss(folder: Path, facts: Facts) -> str:
    near = [differences(facts, entry.facts) for entry in entries(folder)[:NEAREST_OF]]
    if not near:
        return "the cache is empty"
    nearest = min(near, key=len)
    more = f"; and {len(nearest) - 3} more" if len(nearest) > 3 else ""
    return "nearest entry differs in " + "; ".join(nearest[:3]) + more


def trim(
    folder: Path, keep_bytes: int | None = None, newer_than: float | None = None
) -> list[Path]:
    """Remove entries and code: what is damaged, was used before a moment, the oldest beyond a size.

    Args:
        folder: the cache.
        keep_bytes: how much to keep, or None for all.
        newer_than: seconds since the epoch, or None.

    Returns:
        The removed files.
    """
    kept, total = set(), 0
    for entry in entries(folder):
        total += entry.size
        fresh = newer_than is None or entry.used >= newer_than
        if fresh and (keep_bytes is None or total <= keep_bytes):
            kept.add(entry.path)
    present = (path for path in sorted(folder.glob(f"*{SUFFIX}")) if not path.is_dir())
    removed = [path for path in present if path not in kept]
    for used, size, path in sorted(_code_files(folder / CODE), reverse=True):
        total += size
        too_much = keep_bytes is not None and total > keep_bytes
        if too_much or (newer_than is not None and used < newer_than):
            removed.append(path)
    for path in removed:
        path.unlink(missing_ok=True)
        path.with_suffix(".lock").unlink(missing_ok=True)
    return removed


def _code_files(folder: Path) -> list[tuple[float, int, Path]]:
    """When each compiled graph was last used, its size, and its file."""
    paths = (path for path in folder.glob(f"*{CODE_SUFFIX}") if not path.is_dir())
    files = ((path.lstat(), path) for path in paths)
    return [(status.st_mtime, status.st_size, path) for status, path in files]
