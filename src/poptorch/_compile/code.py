"""Compiled graphs, kept by what they were compiled from: in this process and on disk.

A plan is a loop around a few graphs. Counts of iterations, output modes and learning rates are not
in the graphs, so plans that differ in those only share them. One file per graph, whole or absent.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from .._base import archive, keyed, log
from .._base.folders import of_the_user
from .._base.version import VERSION
from .._ir.graph import Graph
from ..backends import Builder, Code, Compiled
from ..backends.prepare import written
from . import serial

SUFFIX = ".code"
_PART, _DIGEST = "code", "digest"
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
        """Return a graph's code, or None.

        A file that is damaged, or was not written by this user, counts as none, with a warning.
        """
        path = self.path(key)
        try:
            parts = archive.read(path)
            code = parts[_PART]
            if not keyed.is_own(key, code, parts.get(_DIGEST, b"")):
                archive.refuse(path, "it does not carry this user's digest")
        except FileNotFoundError:
            return None
        except (archive.InvalidFile, KeyError, OSError) as error:
            warn("Compiled code %s is made again: %s", path, error)
            return None
        with contextlib.suppress(OSError):  # another process may just have removed it
            os.utime(path)
        return code

    def keep(self, key: str, code: bytes) -> None:
        """Put a graph's code into its file, marked as this user's."""
        path, digest = self.path(key), keyed.digest(key, code)
        if digest is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            archive.write(path, {_PART: code, _DIGEST: digest})
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


def warn(text: str, path: Path, error: object) -> None:
    """Say what is wrong with a file or folder; once for each and trouble."""
    why = error.strerror if isinstance(error, OSError) else None
    _warn(text, path, why or str(error))


@functools.cache
def _warn(text: str, path: Path, why: str) -> None:
    log.engine.warning(text, path, why)


def default_store() -> Store:
    """Return the user's own store, or one that ends with the process."""
    return Store(of_the_user())
