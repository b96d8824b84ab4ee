"""Compiled graphs, kept by what they were compiled from: in this process and on disk.

A plan is a loop around a few graphs. Counts of iterations, output modes and learning rates are not
in the graphs, so plans that differ in those only share them. One file per graph, whole or absent.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .._base import archive, env, log
from .._base.version import VERSION
from .._ir.graph import Graph
from ..backends import Builder, Code, Compiled
from ..backends.prepare import written
from . import serial

SUFFIX = ".code"
_PART = "code"
_loaded: dict[str, Compiled] = {}  # a library stays in the process anyway once it is loaded


def key_of(graph: Graph, builder: Builder) -> str | None:
    """Return the digest of all that a graph's code depends on: no names, no lines, no values.

    None if the graph holds something that has no text form.
    """
    try:
        nodes = serial.encode(graph)["nodes"]
    except TypeError as error:
        log.engine.debug("The code of graph %s cannot be kept: %s", graph.name, error)
        return None
    for node in _all(nodes):
        node.pop("name", None)
        node.pop("at", None)
    content = {
        "nodes": nodes,
        "inputs": serial.encode([(slot.shape, slot.dtype) for slot in graph.inputs]),
        "written": written(graph),
        "backend": builder.name,
        "conditions": dict(builder.conditions()),
        "versions": [VERSION, torch.__version__],
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _all(nodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for node in nodes:
        yield node
        yield from _all(node.get("module", []))


class Store:
    """A folder of compiled graphs that several processes may share.

    Args:
        folder: made when something is added.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_empty(self) -> bool:
        """Tell whether nothing was ever kept here."""
        return next(self.folder.glob(f"*{SUFFIX}"), None) is None

    def path(self, key: str) -> Path:
        """Return the file of a graph."""
        return self.folder / f"{key}{SUFFIX}"

    def read(self, key: str) -> bytes | None:
        """Return a graph's code, or None; a damaged file counts as none, with a warning."""
        path = self.path(key)
        try:
            code = archive.read(path)[_PART]
        except FileNotFoundError:
            return None
        except (archive.InvalidFile, KeyError, OSError) as error:
            log.engine.warning("Compiled code %s is made again: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            os.utime(path)
        return code

    def keep(self, key: str, code: bytes) -> None:
        """Take a graph's code over from elsewhere."""
        path = self.path(key)
        if path.exists():
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            archive.write(path, {_PART: code})
        except OSError as error:  # a full disk, for one: this process has the code anyway
            warn("Compiled code is not kept in %s: %s", self.folder, error)

    def find(self, key: str, builder: Builder) -> Compiled | None:
        """Return a graph's function, from this process or the disk."""
        if key in _loaded:
            return _loaded[key]
        code = self.read(key)
        if code is None:
            return None
        try:
            _loaded[key] = builder.load(code)
        except Exception as error:  # whatever it is: the graph can be compiled again
            log.engine.warning("Compiled code %s is made again: %s", self.path(key), error)
            return None
        return _loaded[key]

    def build(self, key: str, graph: Graph, builder: Builder) -> Code | None:
        """Compile a graph unless another process has done it meanwhile; None if one has."""
        with alone(self.folder / f"{key}.lock"):
            if self.read(key) is not None:
                return None
            code = builder.build(graph)
            if code.kept is not None:
                self.keep(key, code.kept)
        return code

    def function(self, key: str, graph: Graph, builder: Builder) -> Compiled:
        """Return a graph's function, compiling it if need be."""
        function = self.find(key, builder)
        if function is None:
            code = self.build(key, graph, builder)
            function = code.run if code is not None else self.find(key, builder)
        if function is None:  # on disk, whole, and still of no use here
            function = builder.build(graph).run
        _loaded[key] = function
        return function


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Within the block no other process has this lock file, where one can be had at all."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:  # then several processes may do the same work
        warn("Nothing can be locked in %s: %s", path.parent, error)
        yield
        return
    try:
        yield
    finally:
        lock.release()


def warn(text: str, folder: Path, error: object) -> None:
    """Say what is wrong with a folder; once for each folder and trouble."""
    why = error.strerror if isinstance(error, OSError) else None
    _warn(text, folder, why or str(error))


@functools.cache
def _warn(text: str, folder: Path, why: str) -> None:
    log.engine.warning(text, folder, why)


def trouble(folder: Path) -> str | None:
    """Make a folder; return why it is of no use for code that will be run, None if it is.

    What is found in it is trusted, so it must belong to the user, and nobody else may write to it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return error.strerror or str(error)
    if status.st_uid != os.getuid():
        return "it belongs to another user"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write to it (chmod go-w)"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written to"


def default_store() -> Store:
    """Return the user's own store, beside torch's compiler cache.

    Code that is found there is run, so a folder that others can write to is not used; the process
    then keeps its code to itself.
    """
    root = env.get("TORCHINDUCTOR_CACHE_DIR")
    folder = Path(root) if root else Path(tempfile.gettempdir()) / f"poptorch-code-{os.getuid()}"
    folder /= "poptorch"
    why = trouble(folder)
    return Store(folder) if why is None else own_store(f"{folder}: {why}")


@functools.cache
def own_store(why: str) -> Store:
    """Return a store that ends with the process, and say why."""
    log.engine.warning("Compiled code is not kept for later processes: %s", why)
    folder = tempfile.TemporaryDirectory(prefix="poptorch-code-")
    atexit.register(folder.cleanup)
    return Store(Path(folder.name))
