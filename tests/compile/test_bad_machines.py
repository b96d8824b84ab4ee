"""Broken compilers, full disks: a warning, and the run goes on with the right numbers."""

import gc
import logging
import tempfile
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import long
from helpers.patience import eventually
from poptorch._base import folders
from poptorch._compile import cache, tiers
from poptorch._cpu import shortcuts, toolchain

REFUSING = """
test $# = 1 && exec g++ "$@"  # --version
for argument in "$@"; do
    if {refused}; then echo "{complaint}" >&2; exit 1; fi
done
while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done
"""
COMPILERS = {  # a script, and what the warning has of it
    "fails": ("echo 'fatal error: on strike' >&2; exit 1", "No working C++ compiler"),
    "writes nonsense": ('while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no > "$2"; shift; done', ""),
    "fails on the kernels": (
        REFUSING.format(
            refused='test -f "$argument" && grep -q "for(int64_t" "$argument"',
            complaint="internal compiler error: ICE",
        ),
        "internal compiler error: ICE",
    ),
    "cannot write the library": (
        REFUSING.format(
            refused='test "$argument" = -shared',
            complaint="final link failed: error: No space left on device",
        ),
        "No space left on device",
    ),
}


def wrapped(backend: str) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 20), torch.nn.GELU())
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(True)
    return poptorch.inferenceModel(model, opts)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(tiers, "SHARE", 0.0)
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)  # or another process would compile
    folders.of_the_process.cache_clear()


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize(
    "backend, kind, sources",
    [
        *(("optimise", kind, 1) for kind in COMPILERS),
        ("optimise", "fails on the kernels", 2),
        ("auto", "cannot write the library", 1),
        long("auto", "writes nonsense", 1),
    ],
)
def test_a_broken_compiler_causes_one_warning_and_the_interpreter_runs(
    backend: str,
    kind: str,
    sources: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from torch._inductor import config

    script, said = COMPILERS[kind]
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))  # torch reads it once in a process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    if backend == "optimise":
        monkeypatch.setattr(shortcuts.Cores, "idle", lambda self: 2.0)  # for two sources
        monkeypatch.setattr(shortcuts, "LARGE", 0 if sources == 2 else 1000)
    model, x = wrapped(backend), torch.randn(4, 4)
    expected = model.model(x).detach()
    with config.patch({"cpp.cxx": (None, str(compiler))}):
        torch.testing.assert_close(model(x), expected)
        if backend == "auto":
            assert eventually(lambda m=model: m(x) is not None and not m._executable.waiting)
            torch.testing.assert_close(model(x), expected)
        else:
            begun = f"captured; compiling takes about {tiers.STARTING - tiers.SOONER:.0f} s"
            assert begun in capsys.readouterr().err
    assert str(model.plan()).startswith("runs on the reference backend")
    (warning,) = warnings(caplog)
    assert "Compilation failed" in warning
    assert said in warning
    gone = weakref.ref(model._session)
    del model
    gc.collect()
    assert gone() is None  # torch keeps the failure


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, place, value, said",
    [
        ("auto", "PATH", "/nowhere", "there is no C++ compiler 'g++'"),
        ("optimise", "CXX", "/nowhere/c++", "there is no C++ compiler '/nowhere/c++'"),
        ("auto", "TORCHINDUCTOR_CACHE_DIR", "/my cache", "C++ compiler, such as '/my cache"),
        ("auto", torch, "/my torch/__init__.py", "C++ compiler, such as '/my torch"),
        ("optimise", toolchain.sysconfig, "/my python", "C++ compiler, such as '/my python"),
    ],
)
def test_the_warning_names_the_missing_tool(
    backend: str,
    place: Any,
    value: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Torch's compiler is given its own folder and that of Python's library, too."""
    monkeypatch.delenv("CXX", raising=False)
    if isinstance(place, str):
        monkeypatch.setenv(place, value)
    elif place is torch:
        monkeypatch.setattr(torch, "__file__", value)
    else:
        monkeypatch.setattr(place, "get_config_var", lambda name: value)
    model, x = wrapped(backend), torch.randn(3, 4)
    torch.testing.assert_close(model(x), model.model(x))
    (warning,) = warnings(caplog)
    assert said in warning
    assert str(model.plan()).startswith("runs on the reference backend")


@pytest.mark.compiling_fails
def test_no_room_for_temporary_files(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    wrapped("reference")(torch.randn(4, 4))  # torch itself imports its tracer with such a folder
    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("POPTORCH_KEY_FILE")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    model, x = wrapped("auto"), torch.randn(4, 4)
    expected = model.model(x).detach()
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    assert any("Compilation failed" in text for text in warnings(caplog))
    assert len(set(warnings(caplog))) == len(warnings(caplog))
