"""Watching a script that wraps models: what each model is made of, and where the time goes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from .. import dataloader
from .._capture import Explanation
from .._data.waiting import verdict
from ..executor import PoplarExecutor


class Enough(BaseException):
    """The script has shown what there is to see. No ``except Exception`` may swallow it."""


class Watch:
    """Explains every wrapped model before it is compiled, and measures what calls wait for.

    Args:
        tell: called with a model's executor and what was found in it.
        most: the script ends after so many calls; None for all of them.

    Attributes:
        calls: of wrapped models.
        fatal: how many findings prevent compiling.
    """

    def __init__(self, tell: Callable[[PoplarExecutor, Explanation], None], most: int | None):
        self.calls = self.fatal = 0
        self._tell, self._most = tell, most
        self._waited = self._inside = 0.0
        self._loads = False
        self._begin: float | None = None  # the end of the first call, which compiles
        self._end = 0.0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block the front door's classes are watched."""
        replaced: list[tuple[type, str, Any]] = [
            (PoplarExecutor, "__call__", self._call),
            (PoplarExecutor, "compile", self._compile),
            (dataloader.DataLoader, "__iter__", self._iterate),
            (dataloader.AsynchronousDataAccessor, "__next__", self._next),
        ]
        before = [(cls, name, vars(cls)[name]) for cls, name, _ in replaced]
        for cls, name, method in replaced:
            setattr(cls, name, _around(vars(cls)[name], method))
        try:
            yield
        finally:
            for cls, name, method in before:
                setattr(cls, name, method)

    def summary(self) -> str:
        """Where the time of all calls but the first went."""
        if self.calls < 2 or self._begin is None:
            return f"{self.calls} calls: too few to say what limits the run."
        total = self._end - self._begin
        if self._loads:
            return f"After the first of {self.calls} calls: {verdict(self._waited, total)}."
        share = self._inside / total if total else 1.0
        return (
            f"After the first of {self.calls} calls: {share:.0%} of {total:.2f} s was spent in "
            "calls of wrapped models. No poptorch.DataLoader was used."
        )

    def _compile(self, original: Any, executor: PoplarExecutor, *args: Any, **kwargs: Any) -> Any:
        self._examine(executor, args, kwargs)
        return original(executor, *args, **kwargs)

    def _call(self, original: Any, executor: PoplarExecutor, *args: Any, **kwargs: Any) -> Any:
        if not executor.isCompiled():
            self._examine(executor, args, kwargs)
        start = time.perf_counter()
        result = original(executor, *args, **kwargs)
        self._end = time.perf_counter()
        self.calls += 1
        if self._begin is None:
            self._begin, self._waited = self._end, 0.0
        else:
            self._inside += self._end - start
        if self.calls == self._most:
            raise Enough
        return result

    def _examine(
        self, executor: PoplarExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if executor.isCompiled():
            return
        findings = executor.explain(*args, **kwargs)
        self._tell(executor, findings)
        self.fatal += len(findings.fatal)
        if findings.fatal:
            raise Enough

    def _iterate(self, original: Any, loader: Any) -> Any:
        self._loads = True
        return _Timed(self._timed(lambda: original(loader)), self._timed)

    def _next(self, original: Any, accessor: Any) -> Any:
        self._loads = True
        return self._timed(lambda: original(accessor))

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._waited += time.perf_counter() - start


class _Timed:
    """An iterator whose elements are waited for under observation."""

    def __init__(self, batches: Any, timed: Callable[[Callable[[], Any]], Any]) -> None:
        self._batches, self._timed = batches, timed

    def __iter__(self) -> _Timed:
        return self

    def __next__(self) -> Any:
        return self._timed(lambda: next(self._batches))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)


def _around(original: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    return watched
