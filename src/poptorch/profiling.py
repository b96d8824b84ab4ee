"""Record named events in torch's profiler and in a trace file of this process.

Source: PopTorch user guide, "Environment variables" and "PopTorch ops".
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch

from ._base import env, log, safe_files

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _HostTrace:
    """Events of this process, which are written in the Trace Event Format when it ends."""

    def __init__(self, directory: Path) -> None:
        self._directory, self._began = directory.absolute(), time.perf_counter()
        self._pid = os.getpid()
        self._events: list[dict[str, Any]] = []
        atexit.register(self.write)

    def add(self, channel: str, name: str, start: float, end: float) -> None:
        self._events.append(
            {
                "ph": "X", "cat": channel, "name": name, "pid": self._pid,
                "tid": threading.get_native_id(), "ts": 1e6 * (start - self._began),
                "dur": 1e6 * (end - start),
            }
        )  # fmt: skip

    def write(self) -> None:
        """Write the recorded events. Forked processes leave this to their parent."""
        if self._events and os.getpid() == self._pid:
            self._directory.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"})
            safe_files.write_text(self._directory / f"trace_{self._pid}.json", text)


def _settings() -> dict[str, Any]:
    text = env.get("PVTI_OPTIONS")
    try:
        settings = json.loads(text) if text else {}
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        log.python.warning(
            'PVTI_OPTIONS is ignored, because it is not a JSON object such as {"enable":"true"}'
        )
        return {}
    return settings


_SETTINGS = _settings()  # read once at import, as in PopTorch
_ENABLED = str(_SETTINGS.get("enable", "false")).lower() == "true"
_TRACE = _HostTrace(Path(str(_SETTINGS.get("directory", ".")))) if _ENABLED else None
_NOTHING = contextlib.nullcontext()  # one object for all calls


class Channel:
    """A group of events under one name; equal names share one channel.

    Set ``PVTI_OPTIONS='{"enable":"true","directory":"DIR"}'`` before the import to record events.
    Torch's profiler shows them as ``channel.event``. At exit they are written to
    ``DIR/trace_PID.json``, which ``pva.openTrace`` and https://ui.perfetto.dev open.

    Args:
        name: the name of the channel.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def instrument(self, obj: T, *methods: str) -> T:
        """Record calls of an object's methods, including special methods such as ``__getitem__``.

        Args:
            obj: any object. ``isinstance`` and pickling work as before.
            methods: the names of the methods.

        Returns:
            The same object. Calls of objects with built-in types are not recorded.
        """
        if _ENABLED:
            with contextlib.suppress(TypeError):  # lists and other built-in types cannot be changed
                cls: Any = type(obj)
                obj.__class__ = _traced(cls, self._name, methods)
        return obj

    def tracepoint(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that records its block as one event."""
        if not _ENABLED:
            return _NOTHING
        return _recorded(self._name, name)

    def _event(self, name: str, function: Callable[P, R]) -> Callable[P, R]:
        """Return a function that records its calls, or the function itself if nothing is
        recorded.
        """
        return _recorded(self._name, name)(function) if _ENABLED else function


@contextlib.contextmanager
def _recorded(channel: str, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        with torch.profiler.record_function(f"{channel}.{name}"):
            yield
    finally:
        if _TRACE is not None:
            _TRACE.add(channel, name, start, time.perf_counter())


@functools.cache
def _traced(cls: Any, channel: str, methods: tuple[str, ...]) -> Any:
    """Return a subclass that records method calls. Its objects are pickled as objects of
    ``cls``.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        make, args, *state = cls.__reduce_ex__(self, max(protocol, 2))
        own = tuple(cls if arg is type(self) else arg for arg in args)
        return _remade, (channel, methods, make, own), *state

    members: dict[str, Any] = {
        name: _recorded(channel, name)(getattr(cls, name)) for name in methods
    }
    names = {"__module__": cls.__module__, "__doc__": cls.__doc__, "__reduce_ex__": reduce}
    return type(cls.__name__, (cls,), {**names, **members})


def _remade(
    channel: str, methods: tuple[str, ...], make: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    return Channel(channel).instrument(make(*args), *methods)
