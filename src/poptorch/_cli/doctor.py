"""Implement ``poptorch doctor``: list everything in a script's models that cannot be captured.

Without a script, ``doctor_machine`` examines the machine instead.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from .. import _capture, dataloader, wrappers
from .._base import env, source
from .._base.private import replaced
from .._data.consumer import verdict
from ..executor import PoplarExecutor
from ..options import Options
from . import doctor_machine
from .commands import FOUND, Misuse, check_file
from .scripts import EndOfScript, run_script


def run(chosen: argparse.Namespace) -> int:
    if chosen.calibrate:
        return _calibrate()
    if not chosen.target:
        return doctor_machine.run(chosen)
    path, _, name = chosen.target.partition(":")
    check_file(path)
    if name:
        return _module(Path(path), name, chosen.arguments, chosen.training)
    return _script(path, chosen.arguments, chosen.calls or None)


def _calibrate() -> int:
    from .._cpu import product_libraries

    print(f"Measuring matrix products on {product_libraries.Table().conditions}", flush=True)
    for shape, found in product_libraries.calibrate().items():
        print(f"{shape!s:18} {found}")
    return 0


def _script(path: str, arguments: list[str], most: int | None) -> int:
    watch = Watch(most)
    broken = False
    limit = f", at most {most} calls of wrapped models" if most else ""
    print(f"Running {' '.join([path, *arguments])}{limit}", flush=True)
    try:
        with (
            env.put_within("POPTORCH_CHECK_AGAINST_EAGER", "error"),
            replaced(PoplarExecutor, "__call__", watch.call),
            replaced(PoplarExecutor, "compile", watch.compile),
            replaced(dataloader.DataLoader, "__iter__", watch.iterate),
            replaced(dataloader.AsynchronousDataAccessor, "__next__", watch.next),
        ):
            run_script(path, arguments)
    except SystemExit as end:
        broken = end.code not in (None, 0)
    except BrokenPipeError:
        raise  # no program reads the output any more
    except Exception as error:
        broken = True
        print(f"The script failed:\n{_described_error(error, path)}")
    if not (watch.models or broken):
        raise Misuse(
            f"{path} used no wrapped model. To examine a module in this file: poptorch doctor "
            f"{path}:NAME"
        )
    if not watch.fatal and not (broken and not watch.calls):
        print(watch.summary())
    return FOUND if broken or watch.fatal else 0


def _print_findings(executor: PoplarExecutor, findings: _capture.Explanation) -> None:
    kind = "inference" if executor._optimizer is None else "training"
    # the model's class has this prefix while it is wrapped for training
    name = type(executor.model).__name__.removeprefix("Poptorch")
    print(f"{name}, {kind}, called at {source.calling_line()}\n{findings}\n")


def _module(path: Path, name: str, shapes: list[str], training: bool) -> int:
    does = "run its forward once" if shapes else "search its source"
    print(f"Importing {path}, to create {name} and {does}", flush=True)
    module = _made(path, name)
    if not shapes:
        findings = _capture.search(module)
    else:
        options = Options().backend("reference")
        inputs = [_input(text) for text in shapes if "=" not in text]
        split = [text.split("=", 1) for text in shapes if "=" in text]
        named = {word: _input(text) for word, text in split}
        if training:
            optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
            findings = wrappers.trainingModel(module, options, optimizer).explain(*inputs, **named)
        else:
            findings = wrappers.inferenceModel(module, options).explain(*inputs, **named)
    if shapes or findings:
        print(findings)
    else:
        print(
            "The source contains nothing that prevents capturing the model. If you pass "
            "shapes, forward is also tried."
        )
    return FOUND if findings.fatal else 0


def _made(path: Path, name: str) -> nn.Module:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = file
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(file)
        value: Any = getattr(file, name, None)
        made = value if isinstance(value, nn.Module) or not callable(value) else value()
    except BrokenPipeError:
        raise
    except Exception as error:
        sys.exit(f"{path} failed:\n{_described_error(error, str(path))}")
    finally:
        sys.path.remove(str(path.parent))
    if not isinstance(made, nn.Module):
        raise Misuse(
            f"{name} in {path} is neither a torch.nn.Module nor a function that returns one: "
            f"{made!r}"
        )
    return made


def _described_error(error: Exception, path: str) -> str:
    trace = error.__traceback__
    while trace is not None and not os.path.samefile(_file(trace), path):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _file(trace: TracebackType) -> str:
    name = trace.tb_frame.f_code.co_filename
    return name if os.path.exists(name) else os.devnull  # the code does not come from a file


def _input(text: str) -> torch.Tensor:
    sizes, _, kind = text.partition(":")
    dtype = getattr(torch, kind or "float32", None)
    try:
        shape = [int(size) for size in sizes.split(",") if size]
    except ValueError:
        shape = None
    if shape is None or not isinstance(dtype, torch.dtype):
        raise Misuse(f"{text} is not a shape: write 8,3 or 8:int64")
    return (
        torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)
    )


class Watch:
    """Explain every wrapped model before it is compiled, and measure how long calls wait, and for
    what.
    """

    def __init__(self, most: int | None) -> None:
        # number of calls of wrapped models; number of explained models
        self.calls = self.models = 0
        self.fatal = 0  # number of findings that prevent compiling
        self._most = most
        self._waited = self._inside = 0.0
        self._loads = False
        self._begin: float | None = None  # end of the first call, which compiles the model
        self._end = 0.0

    def summary(self) -> str:
        if self.calls < 2 or self._begin is None:
            return f"{self.calls} calls are too few to determine what limits the run."
        total = self._end - self._begin
        if self._loads:
            return f"After the first of {self.calls} calls, {verdict(self._waited, total)}."
        share = self._inside / total if total else 1.0
        return (
            f"After the first of {self.calls} calls: {share:.0%} of {total:.2f} s was spent in "
            "calls of wrapped models. No poptorch.DataLoader was used."
        )

    def compile(self, original: Any, executor: PoplarExecutor, *args: Any, **kwargs: Any) -> Any:
        self._examine(executor, args, kwargs)
        return original(executor, *args, **kwargs)

    def call(self, original: Any, executor: PoplarExecutor, *args: Any, **kwargs: Any) -> Any:
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
            raise EndOfScript
        return result

    def _examine(
        self, executor: PoplarExecutor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if executor.isCompiled():
            return
        findings = executor.explain(*args, **kwargs)
        _print_findings(executor, findings)
        self.models += 1
        self.fatal += len(findings.fatal)
        if findings.fatal:
            raise EndOfScript

    def iterate(self, original: Any, loader: Any) -> Any:
        self._loads = True
        return self._each(self._timed(lambda: original(loader)))

    def _each(self, batches: Any) -> Iterator[Any]:
        end = object()
        while (batch := self._timed(lambda: next(batches, end))) is not end:
            yield batch

    def next(self, original: Any, accessor: Any) -> Any:
        self._loads = True
        return self._timed(lambda: original(accessor))

    def _timed(self, work: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        try:
            return work()
        finally:
            self._waited += time.perf_counter() - start
