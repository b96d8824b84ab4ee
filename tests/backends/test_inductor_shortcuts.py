"""What is taken for granted about the machine, and what happens where it is not so."""

from __future__ import annotations

import gc
import logging
import signal
import subprocess
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.exc import CppCompileError

import poptorch
from helpers.wrapped import normal, options
from poptorch._base import private
from poptorch._compile import cache, tiers
from poptorch.backends.inductor import compiler, processor, sources

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("capability", "known"), [("AVX512", True), ("AVX2", True), ("DEFAULT", False), ("Z", False)]
)
def test_vectors_are_tried_out_where_aten_uses_none(capability, known, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert processor.has_vectors() is known
    assert compiler._shortcuts() == ({"cpp.vec_isa_ok": True} if known else {})
    assert ("check_build" in compiler._stand_ins(sources.Sources())) is known


def test_the_table_of_private_names_has_the_functions_with_stand_ins(monkeypatch) -> None:
    monkeypatch.setattr(compiler, "has_vectors", lambda: True)
    replaced = {name for name, (_, lost) in private.ROWS.items() if lost == private.QUICK}
    assert set(compiler._stand_ins(sources.Sources())) == replaced


@pytest.mark.compiling_fails
def test_a_compiler_that_does_not_know_the_instructions(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """The reference backend runs the program, and the warning quotes the compiler."""

    def old(*arguments: object, **options: object) -> None:
        said = "g++: error: unrecognized command-line option '-mavx512f'\n"
        raise CppCompileError(["g++", "a.cpp"], said)

    monkeypatch.setattr(compiler, "_compile", old)
    model, x = compiled_here(tmp_path, monkeypatch)
    torch.testing.assert_close(model(x), model.model(x))
    assert model._executable.report().backend == "reference"
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "unrecognized command-line option" in warning


def compiled_here(folder: Path, monkeypatch) -> tuple[poptorch.PoplarExecutor, torch.Tensor]:
    """A model that this process compiles with its next call, nothing cached, and its input."""
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)  # or another process would compile
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    net = nn.Sequential(nn.Linear(4, 20), nn.GELU())
    return poptorch.inferenceModel(net, options().backend("optimise")), normal(3, 4)


def called(compiler: Path) -> dict[str, object]:
    """Settings for another compiler, whose headers nobody else would use."""
    return {"cpp.cxx": (None, str(compiler)), "cpp_cache_precompile_headers": False}


COMPILER = """#!/bin/sh
test $# = 1 && exec g++ "$@"  # --version
for argument in "$@"; do
    if {refused}; then echo "{complaint}" >&2; exit 1; fi
done
while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""


@pytest.mark.compiling_fails
@pytest.mark.parametrize(
    ("refused", "complaint"),
    [  # what the processor is said to have, the file with the kernels, the library
        ('test "$argument" = -march=native', "error: unrecognized command-line option"),
        ('test -f "$argument" && grep -q Vectorized "$argument"', "internal compiler error: ICE"),
        ('test "$argument" = -shared', "final link failed: error: No space left on device"),
    ],
)
@pytest.mark.parametrize("idle", [0.0, 2.0])
def test_a_compiler_that_fails(
    refused: str, complaint: str, idle: float, tmp_path: Path, monkeypatch, caplog
) -> None:
    """On one of its files, or on all: one warning, and the reference backend's results."""
    script = tmp_path / "compiler"
    script.write_text(COMPILER.format(refused=refused, complaint=complaint))
    script.chmod(0o700)
    monkeypatch.setattr(compiler, "SETTINGS", {**compiler.SETTINGS, **called(script)})
    monkeypatch.setattr(sources.Cores, "idle", lambda self: idle)  # two sources, or one
    model, x = compiled_here(tmp_path, monkeypatch)
    torch.testing.assert_close(model(x), model.model(x), rtol=0, atol=0)
    assert model._executable.report().backend == "reference"
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert complaint in warning
    gone = weakref.ref(model._session)
    del model
    gc.collect()
    assert gone() is None  # torch keeps the failure


NEW = """#!/bin/sh
for argument in "$@"; do
    if test "$argument" = -w; then echo "error: what is -w?" >&2; exit 1; fi
done
echo >> {log}
exec g++ "$@"
"""


def test_a_compiler_that_does_not_take_the_options_that_save_time(
    tmp_path: Path, monkeypatch
) -> None:
    """It is called as torch calls it."""
    script, calls = tmp_path / "compiler", tmp_path / "calls"
    script.write_text(NEW.format(log=calls))
    script.chmod(0o700)
    monkeypatch.setattr(compiler, "SETTINGS", {**compiler.SETTINGS, **called(script)})
    monkeypatch.setattr(sources.Cores, "idle", lambda self: 0.0)
    model, x = compiled_here(tmp_path, monkeypatch)
    torch.testing.assert_close(model(x), model.model(x))
    assert model._executable.report().backend == "inductor"
    assert calls.exists()


@pytest.mark.parametrize("known", [True, False])
def test_the_linker_is_named_where_it_is_there(known: bool, monkeypatch) -> None:
    monkeypatch.setattr(sources.shutil, "which", lambda name: known)
    sources._less.cache_clear()
    said: list[str] = []
    sources.run(lambda cmd_line, cwd: said.append(cmd_line), "g++ a.cpp", "/")
    sources._less.cache_clear()
    (line,) = said
    assert line.startswith(f"g++ a.cpp {sources.LEAN}")
    assert ("-fuse-ld=gold" in line) is known


@pytest.mark.parametrize(("status", "runs"), [(1, 2), (-signal.SIGINT, 1)])
def test_a_compiler_that_a_signal_has_ended_is_not_run_again(status: int, runs: int) -> None:
    asked: list[str] = []

    def usual(cmd_line: str, cwd: str) -> None:
        asked.append(cmd_line)
        ended = subprocess.CalledProcessError(status, cmd_line)
        raise private.CppCompileError([cmd_line], "") from ended

    with pytest.raises(private.CppCompileError):
        sources.run(usual, "g++ a.cpp", "/")
    assert len(asked) == runs


@pytest.mark.parametrize(
    ("large", "idle", "two"), [(False, 0.0, False), (True, 0.0, True), (False, 2.0, True)]
)
def test_only_the_function_that_calls_kernels_is_hardly_optimised(
    large: bool, idle: float, two: bool, tmp_path: Path, monkeypatch
) -> None:
    """In one source by an attribute; in two by the options of its own, which torch chooses."""
    monkeypatch.setattr(sources, "LARGE", 0 if large else 1000)
    monkeypatch.setattr(sources.Cores, "idle", lambda self: idle)
    model, x = compiled_here(tmp_path, monkeypatch)
    torch.testing.assert_close(model(x), model.model(x))
    assert model._executable.report().backend == "inductor"
    written = [path.read_text() for path in tmp_path.rglob("*.cpp")]
    assert len(written) == 1 + two
    assert [text.count(f"{sources.QUICKLY} {sources.ENTRY}") for text in written].count(1) == 1
    assert sum(text.count(sources.QUICKLY) for text in written) == 1


def test_torchs_compiler_looks_up_and_makes_nothing_that_is_known(
    tmp_path: Path, monkeypatch
) -> None:
    """No key for its own cache; its table of types, which is one object, is filled once."""
    looked_up, filled = [], []
    table, usual = private.DtypePropagationOpsHandler, private.compile_fx_inner
    fill = table.__init__

    def spy(*arguments: object, **options: object) -> object:
        looked_up.append(private.config.fx_graph_cache)
        return usual(*arguments, **options)

    def counted(self: object) -> None:
        filled.append(self)
        fill(self)

    monkeypatch.setattr(private, "compile_fx_inner", spy, raising=False)
    monkeypatch.setattr(table, "__init__", counted)
    model, x = compiled_here(tmp_path, monkeypatch)
    torch.testing.assert_close(model(x), model.model(x))
    assert (looked_up, len(filled)) == ([False], 1)
