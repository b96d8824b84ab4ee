"""Broken compilers, full disks: a warning, and the run goes on with the right numbers."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.patience import eventually
from poptorch._base import folders
from poptorch._compile import cache, tiers

COMPILERS = {
    "fails": "echo 'fatal error: on strike' >&2; exit 1",
    "writes nothing": "exit 0",
    "writes nonsense": 'while [ $# -gt 0 ]; do [ "$1" = -o ] && echo no > "$2"; shift; done',
    "is killed": "kill -9 $$",
}


def wrapped(backend: str) -> poptorch.PoplarExecutor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.LayerNorm(3))
    opts = poptorch.Options().backend(backend).showCompilationProgressBar(False)
    return poptorch.inferenceModel(model, opts)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setattr(tiers, "SHARE", 0.0)
    folders.of_the_process.cache_clear()


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize(
    ("backend", "kind"),
    [*(("optimise", kind) for kind in COMPILERS), ("auto", "writes nonsense")],
)
def test_broken_compilers(backend: str, kind: str, tmp_path: Path, monkeypatch, caplog) -> None:
    from torch._inductor import config

    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\n{COMPILERS[kind]}\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))  # torch reads it once in a process
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "code"))
    model, x = wrapped(backend), torch.randn(4, 4)
    expected = model.model(x).detach()
    with config.patch({"cpp.cxx": (None, str(compiler))}):
        torch.testing.assert_close(model(x), expected)
        if backend == "auto":
            assert eventually(lambda: model(x) is not None and not model._executable.waiting)
            torch.testing.assert_close(model(x), expected)
    (warning,) = warnings(caplog)
    assert "Compiling failed" in warning


@pytest.mark.compiling_fails
@pytest.mark.parametrize("backend", ["optimise", "auto"])
def test_no_room_for_temporary_files(backend: str, monkeypatch, caplog) -> None:
    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    wrapped("reference")(torch.randn(4, 4))  # torch itself imports its tracer with such a folder
    monkeypatch.setattr(tempfile, "gettempdir", full)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.delenv("POPTORCH_KEY_FILE")
    monkeypatch.setenv("HOME", "/proc/nowhere")
    model, x = wrapped(backend), torch.randn(4, 4)
    expected = model.model(x).detach()
    for _ in range(3):
        torch.testing.assert_close(model(x), expected)
    assert any("Compiling failed" in text for text in warnings(caplog))
    assert len(set(warnings(caplog))) == len(warnings(caplog))
