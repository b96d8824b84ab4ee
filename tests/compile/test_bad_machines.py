"""Broken compilers, full disks: a warning, and the run goes on with the right numbers."""

import gc
import logging
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import long
from helpers.patience import eventually
from poptorch._base import folders
from poptorch._compile import cache, plan_code, tiers
from poptorch._cpu import compile_speedups, toolchain

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


@dataclass
class Broken:
    """A model that was called with a broken compiler, and what came of it."""

    model: poptorch.PoplarExecutor | None
    results: list[torch.Tensor]
    expected: torch.Tensor
    """What eager PyTorch computes."""
    complaint: str
    """What the warning has of the compiler's complaint."""
    shown: str
    """What was written to the terminal in the first call."""
    warnings: list[str]


@pytest.fixture
def broken(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> Broken:
    """Return a model that was called until nothing waits for compiled code any more."""
    from torch._inductor import config

    backend, kind, sources = request.param
    script, complaint = COMPILERS[kind]
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))  # torch reads it once in a process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    if backend == "optimise":
        monkeypatch.setattr(compile_speedups.Cores, "idle", lambda self: 2.0)  # for two sources
        monkeypatch.setattr(compile_speedups, "LARGE", 0 if sources == 2 else 1000)
    model, x = wrapped(backend), torch.randn(4, 4)
    expected = model.model(x).detach()
    with config.patch({"cpp.cxx": (None, str(compiler))}):
        results = [model(x)]
        shown = capsys.readouterr().err
        if backend == "auto":
            assert eventually(lambda: model(x) is not None and not model._executable.waiting)
            results.append(model(x))
    return Broken(model, results, expected, complaint, shown, warnings(caplog))


IN_FIRST_CALL = [
    *(("optimise", kind, 1) for kind in COMPILERS),
    ("optimise", "fails on the kernels", 2),
]
"""Ways in which a compiler is broken that the first call waits for."""
AFTER_FIRST_CALL = [("auto", "cannot write the library", 1), long(("auto", "writes nonsense", 1))]
"""The same, of a compiler that runs while the model is called."""


def with_compilers(cases: list[Any]) -> Any:
    """Return the mark of a test that runs with broken compilers."""
    return pytest.mark.parametrize(
        "broken", cases, indirect=True, ids=lambda case: "-".join(map(str, case))
    )


@pytest.mark.slow
@pytest.mark.compiling_fails
@with_compilers(IN_FIRST_CALL + AFTER_FIRST_CALL)
def test_with_a_broken_compiler_the_interpreter_computes_what_eager_pytorch_does(
    broken: Broken,
) -> None:
    assert str(broken.model.plan()).startswith("runs on the reference backend")
    for result in broken.results:
        torch.testing.assert_close(result, broken.expected)


@pytest.mark.slow
@pytest.mark.compiling_fails
@with_compilers(IN_FIRST_CALL + AFTER_FIRST_CALL)
def test_one_warning_has_the_complaint_of_a_broken_compiler(broken: Broken) -> None:
    (warning,) = broken.warnings

    assert "Compilation failed" in warning
    assert broken.complaint in warning


@pytest.mark.slow
@pytest.mark.compiling_fails
@with_compilers(IN_FIRST_CALL)
def test_progress_says_how_long_compiling_takes_before_it_fails(broken: Broken) -> None:
    begun = f"captured; compiling takes about {plan_code.STARTING - tiers.SAVED_SECONDS:.0f} s"

    assert begun in broken.shown


@pytest.mark.slow
@pytest.mark.compiling_fails
@with_compilers(IN_FIRST_CALL + AFTER_FIRST_CALL)
def test_a_failed_compilation_keeps_no_model_alive(broken: Broken) -> None:
    """Torch keeps the exception, and the exception's frames referred to the program."""
    session = weakref.ref(broken.model._session)

    broken.model = None
    gc.collect()

    assert session() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend, place, value, complaint",
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
    complaint: str,
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
    assert complaint in warning
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
