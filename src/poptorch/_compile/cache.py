"""Cache compiled graphs on disk by everything that they depend on, remember the programs that
contain them, and explain why a program was not found.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .._base import VERSION, archive, log, nested_values, safe_files, signed_code
from .._base.errors import described, one_line
from .._base.folders import of_the_process, of_the_user, problem_with
from .._ir import graph_json
from .._ir.graph import Graph
from .._ir.plan import Plan
from .._ir.slots import Kind, Slot
from ..backends import Builder, Code, Compiled
from ..backends.prepare import written

SUFFIX, CODE_SUFFIX, CHECKED_SUFFIX, CHOICE_SUFFIX = ".popef", ".code", ".checked", ".choice"
NEAREST_OF = 50  # number of entries, the latest ones, with which a miss is compared
_PART, _DIGEST, _FACTS = "code", "digest", "facts.json"
_loaded: dict[str, Compiled] = {}  # a loaded library stays in the process anyway
Facts = dict[str, str]

# Graphs.


def key_of(graph: Graph, builder: Builder) -> str | None:
    """Return the digest of everything that a graph's code depends on; None if some of it has no
    text form.

    Sizes are a part of it, or the names of symbolic ones. Shapes are then those of example sizes,
    so that one entry serves all sizes.
    """
    try:
        nodes = graph_json.encode_nodes(graph.module)
    except TypeError as error:
        log.engine.debug("The compiled code of graph %s cannot be stored: %s", graph.name, error)
        return None
    for node in _all(nodes):
        node.pop("name", None)
        node.pop("at", None)
    content = {
        "nodes": nodes,
        "inputs": graph_json.encode([_kind(slot) for slot in graph.inputs]),
        "written": written(graph),
        "backend": builder.name,
        "conditions": dict(builder.conditions(graph)),
        "versions": [VERSION, torch.__version__],
    }
    return _digest_of(content)


def _kind(slot: Slot) -> tuple[object, ...]:
    kind = slot.shape, slot.dtype
    return (*kind, slot.symbols) if slot.symbols else kind


def _all(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from _all(node.get("module", []))


def _digest_of(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


class Store:
    """A folder that several processes may share, with a signed ``.code`` file per graph.

    Files of several keys can be in one folder, because a container with a new home directory has a
    new key. A folder from the options also contains a ``.popef`` file per program, which lists what
    the program depends on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_empty(self) -> bool:
        return next(self.folder.glob(f"*{CODE_SUFFIX}"), None) is None

    def path(self, key: str) -> Path:
        return self.folder / f"{_prefix_of_user(key)}{CODE_SUFFIX}"

    def read(self, key: str) -> bytes | None:
        path = self.path(key)
        try:
            parts = archive.read(path)
            code = parts[_PART]
            if not signed_code.is_own(key, code, parts.get(_DIGEST, b"")):
                archive.refuse(path, "it is not signed with the key of this user")
        except FileNotFoundError:
            return None
        except (archive.InvalidFile, KeyError, OSError) as error:
            warn("The compiled code in %s cannot be used and is compiled again: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            os.utime(path)
        return code

    def keep(self, key: str, code: bytes) -> None:
        digest = signed_code.digest(key, code)
        if digest is not None:
            self._write(self.path(key), {_PART: code, _DIGEST: digest})

    def _write(self, path: Path, parts: Mapping[str, bytes]) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            archive.write(path, parts)
        except OSError as error:  # for example a full disk; this process has the code anyway
            warn("Compiled code is not stored in %s: %s", self.folder, error)

    def find(self, key: str, builder: Builder) -> Compiled | None:
        if key in _loaded:
            return _loaded[key]
        code = self.read(key)
        if code is None:
            return None
        try:
            _loaded[key] = builder.load(code)
        except Exception as error:  # after any error, the graph can be compiled again
            text = "The compiled code in %s cannot be used and is compiled again: %s"
            warn(text, self.path(key), error)
            return None
        return _loaded[key]

    def build(self, key: str, graph: Graph, builder: Builder) -> Code | None:
        """Compile a graph unless another process has compiled it in the meantime; None in
        that case.
        """
        with _locked(self.path(key).with_suffix(".lock")):
            if self.read(key) is not None:
                return None
            code = builder.build(graph)
            if code.kept is not None:
                self.keep(key, code.kept)
        return code

    def function(self, key: str, graph: Graph, builder: Builder) -> Compiled:
        function = self.find(key, builder)
        if function is None:
            code = self.build(key, graph, builder)
            function = code.run if code is not None else self.find(key, builder)
        if function is None:  # it is complete on disk, but cannot be used here
            function = builder.build(graph).run
        _loaded[key] = function
        return function

    def is_checked(self, key: str) -> bool:
        """Return whether a program was compared with eager PyTorch when it was first compiled."""
        return (self.folder / f"{key}{CHECKED_SUFFIX}").exists()

    def note_checked(self, key: str) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            note = self.folder / f"{key}{CHECKED_SUFFIX}"
            safe_files.write_text(note, "agrees with eager PyTorch\n")
        except OSError as error:  # the next process repeats the check
            warn(
                "Results of checks against eager PyTorch are not stored in %s: %s",
                self.folder,
                error,
            )

    def choice(self, key: str) -> Choice | None:
        """Return what was measured for a program, or None. Anybody may have written the file."""
        try:
            found = archive.from_json((self.folder / f"{key}{CHOICE_SUFFIX}").read_bytes())
            ours, other, session = map(float, found["seconds"])
            return Choice(ours, other, session, one_line(str(found["why"])))
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            if not isinstance(error, FileNotFoundError):
                log.engine.debug("The choice of a runtime is made again: %s", described(error))
            return None

    def note_choice(self, key: str, choice: Choice) -> None:
        content = {"seconds": [choice.ours, choice.other, choice.session], "why": choice.why}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            safe_files.write_text(self.folder / f"{key}{CHOICE_SUFFIX}", json.dumps(content))
        except OSError as error:  # the next process chooses again
            warn("The choice of a runtime is not stored in %s: %s", self.folder, error)

    def note(self, facts: Facts) -> None:
        path = _entry_path(self.folder, facts)
        if not path.exists():
            self._write(path, {_FACTS: json.dumps(facts).encode()})


@dataclass(frozen=True)
class Choice:
    """The seconds of a call of compiled code and of another runtime, and of preparing the other
    one; or why the other one is ruled out.
    """

    ours: float
    other: float
    session: float
    why: str = ""

    @property
    def gain(self) -> float:
        return self.ours - self.other

    def pays(self, share: float) -> bool:
        """Return whether the other one takes less than a share of the time of compiled code."""
        return not self.why and self.other < share * self.ours

    def __str__(self) -> str:
        return f"{self.other * 1e3:.3g} ms a call, compiled code {self.ours * 1e3:.3g} ms"


def choice_key(ours: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return a key for the code of both runtimes, which depends on everything that matters."""
    return _digest_of([dict(ours), dict(other)])


def _prefix_of_user(key: str) -> str:
    """Return the prefix of a file name that only this user's key can have."""
    name = signed_code.name()
    return f"{key}-{name}" if name else key


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            stack.enter_context(FileLock(path))
        except OSError as error:  # without the lock, several processes may do the same work
            warn("Files in %s cannot be locked: %s", path.parent, error)
        yield


def warn(text: str, path: Path, error: object) -> None:
    """Warn about a file or folder, once for each of them and problem."""
    why = error.strerror if isinstance(error, OSError) else None
    _warn(text, path, why or str(error))


@functools.cache
def _warn(text: str, path: Path, why: str) -> None:
    log.engine.warning(text, path, why)


def default_store() -> Store:
    return Store(of_the_user())


def store_of(directory: str | None) -> Store:
    if directory is None:
        return default_store()
    folder = Path(directory)
    is_new = not folder.exists()
    why = problem_with(folder, on_the_way=False)  # only files with the user's digest are used
    if why is not None:
        remedy = "choose a folder that belongs to you: options.enableExecutableCaching(folder)"
        return Store(of_the_process(f"executable cache {folder}: {why}; {remedy}"))
    if is_new:
        log.engine.warning('Specified directory not found. Creating "%s" directory', directory)
    return Store(folder)


# Programs.


def log_hit_or_miss(folder: Path, facts: Facts) -> None:
    path = _entry_path(folder, facts)
    try:
        archive.read(path)
        os.utime(path)
    except FileNotFoundError:
        log.engine.info("Executable cache: miss, %s: %s", path.name, _miss(folder, facts))
    except (archive.InvalidFile, OSError) as error:
        why = error.message if isinstance(error, archive.InvalidFile) else error
        log.engine.warning("Executable cache: %s is rebuilt. %s", path.name, why)
        with contextlib.suppress(OSError):
            path.unlink()
    else:
        log.engine.info("Executable cache: hit, %s", path)


def facts_of(plan: Plan, backend: str, arguments: Mapping[str, nested_values.Structure]) -> Facts:
    facts = {
        "backend": backend,
        "machine": platform.machine(),
        "poptorch": VERSION,
        "torch": torch.__version__,
        **flat_fields(plan.spec.for_cache()),
    }
    for name, structure in arguments.items():
        facts |= {f"{_CONSTANT}{path}": repr(value) for path, value in structure.constants}
        facts |= {f"{_TYPE}{name}": structure.kind.__name__}
    slots = {s.key: s for graph in plan.program.graphs.values() for s in graph.inputs}
    for slot in slots.values():
        if slot.kind in (Kind.BATCH, Kind.PARAM, Kind.BUFFER, Kind.OPTSTATE):
            name = f"{_INPUT}{slot.index}" if slot.kind is Kind.BATCH else slot.key
            facts[name] = slot.type_text
    for name, graph in plan.program.graphs.items():
        try:
            nodes = graph_json.encode_nodes(graph.module)
        except TypeError as error:  # for example a generator in the model
            facts[f"{name}{_OPERATOR}0"] = f"the program has no text form: {error}"
            continue
        for at, node in enumerate(node for node in nodes if node["op"] != "placeholder"):
            where = f"{_AT}{node['at']}" if "at" in node else ""
            content = [node.get("args"), node.get("kwargs"), node.get("module")]
            target = node.get("target", node["op"])
            facts[f"{name}{_OPERATOR}{at}"] = f"{target} ({_digest_of(content)[:6]}){where}"
    return facts


_INPUT, _CONSTANT, _TYPE, _OPERATOR, _AT = "input ", "constant ", "type of ", " operator ", " at "


def flat_fields(value: Any, prefix: str = "") -> Facts:
    facts: Facts = {}
    for field in fields(value):
        name, inner = f"{prefix}{field.name}", getattr(value, field.name)
        if is_dataclass(inner):
            facts |= flat_fields(inner, f"{name}.")
        else:
            facts[name] = str(inner)
    return facts


def _entry_path(folder: Path, facts: Facts) -> Path:
    """Return the file of a program. Constants count as operators, and lines do not count."""
    return folder / f"{_prefix_of_user(_digest_of_facts(facts))}{SUFFIX}"


def _digest_of_facts(facts: Facts) -> str:
    names = (name for name in facts if not name.startswith((_CONSTANT, _TYPE)))
    return _digest_of({name: _without_line(facts, name) for name in names})


def _without_line(facts: Facts, name: str) -> str:
    text = facts.get(name, "")
    return text.partition(_AT)[0] if _OPERATOR in name else text


@dataclass(frozen=True)
class Entry:
    path: Path
    facts: Facts  # everything that the program depends on, as readable text
    size: int  # bytes
    used: float  # when it was last written or found, in seconds since the epoch

    @property
    def headline(self) -> str:
        names = (name for name in self.facts if name.startswith(_INPUT))
        inputs = " ".join(self.facts[name] for name in sorted(names, key=lambda n: (len(n), n)))
        return f"{'training' if self.facts.get('training') == 'True' else 'inference'}  {inputs}"


def entries(folder: Path, most: int | None = None) -> list[Entry]:
    """Return the complete entries, the latest ones first; ``most``: read at most this number."""
    whole = []
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=_age)[:most]:
        try:
            facts, status = _facts(archive.read(path)[_FACTS]), path.stat()
        except (archive.InvalidFile, OSError, KeyError, ValueError, RecursionError):
            continue  # damaged, or just being removed
        whole.append(Entry(path, facts, status.st_size, status.st_mtime))
    return sorted(whole, key=lambda entry: entry.used, reverse=True)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:  # it is just being removed
        return 0.0


def _facts(data: bytes) -> Facts:
    facts = archive.from_json(data)  # anybody may have written this
    if not isinstance(facts, dict) or not all(isinstance(text, str) for text in facts.values()):
        raise ValueError("it is not an object of strings")
    return {one_line(name): one_line(text) for name, text in facts.items()}


def differences(
    own_facts: Facts, other_facts: Facts, here: str = "here", there: str = "there"
) -> list[str]:
    """Describe the differences; of differing operators, only the first in each graph.

    ``here`` and ``there`` say in the texts where the facts come from.
    """
    lines, graphs = [], set()
    for name in sorted({*own_facts, *other_facts}, key=_order):
        if own_facts.get(name) == other_facts.get(name):
            continue
        graph, _, operator = name.partition(_OPERATOR)
        if operator:
            if graph in graphs or _without_line(own_facts, name) == _without_line(
                other_facts, name
            ):
                continue
            graphs.add(graph)
        lines.append(
            f"{name}: {own_facts.get(name, 'absent')} {here}, "
            f"{other_facts.get(name, 'absent')} {there}"
        )
    return lines


def _order(name: str) -> tuple[bool, str, str]:
    graph, _, operator = name.partition(_OPERATOR)
    return bool(operator), graph, operator.zfill(9)  # by number, and by any other text


def _miss(folder: Path, facts: Facts) -> str:
    if any(folder.glob(f"{_digest_of_facts(facts)}*{SUFFIX}")):
        return (
            "the stored code is not run, because it is signed with the key of another home folder; "
            "to use the same key everywhere, set POPTORCH_KEY_FILE"
        )
    near = [differences(facts, entry.facts) for entry in entries(folder, NEAREST_OF)]
    if not near:
        return "the cache is empty"
    nearest = min(near, key=len)
    more = f"; and {len(nearest) - 3} more" if len(nearest) > 3 else ""
    return "the most similar entry differs in " + "; ".join(nearest[:3]) + more


def trim(
    folder: Path, keep_bytes: int | None = None, newer_than: float | None = None
) -> list[Path]:
    """Remove entries that are damaged, or were last used before a time, or are the oldest beyond a
    size. Return them.
    """
    whole, total, removed = {entry.path for entry in entries(folder)}, 0, []
    paths = [path for suffix in (SUFFIX, CODE_SUFFIX) for path in folder.glob(f"*{suffix}")]
    files = [(path.lstat(), path) for path in sorted(paths) if not path.is_dir()]
    for status, path in sorted(files, key=lambda file: file[0].st_mtime, reverse=True):
        total += status.st_size
        old = newer_than is not None and status.st_mtime < newer_than
        damaged = path.suffix == SUFFIX and path not in whole
        if damaged or old or (keep_bytes is not None and total > keep_bytes):
            removed.append(path)
            path.unlink(missing_ok=True)
            path.with_suffix(".lock").unlink(missing_ok=True)
    notes = (path for end in (CHECKED_SUFFIX, CHOICE_SUFFIX) for path in folder.glob(f"*{end}"))
    for path in notes:  # these need almost no space
        if keep_bytes == 0 or (newer_than is not None and path.lstat().st_mtime < newer_than):
            removed.append(path)
            path.unlink(missing_ok=True)
    return removed
