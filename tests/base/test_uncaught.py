"""Uncaught exceptions go through the logger, once, the message first."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from helpers.source_tree import ROOT

pytestmark = pytest.mark.slow


def run(code: str, **environment: str) -> str:
    """Run code that fails in a process of its own; return what it wrote to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
    )
    assert done.returncode == 1
    return done.stderr


@pytest.mark.spec("runtime", 35)
@pytest.mark.parametrize("level", ["TRACE", "WARN", "OFF"])
def test_reported_once_with_the_message_first(level: str) -> None:
    text = run("import poptorch\nraise ValueError('the\\nmistake')", POPTORCH_LOG_LEVEL=level)
    first, *rest = text.splitlines()
    assert first.endswith("[poptorch::python] [critical] ValueError: the")
    assert rest[:2] == ["mistake", "Traceback (most recent call last):"]
    assert text.count("Traceback") == 1


def test_output_of_a_failed_subprocess_is_appended() -> None:
    text = run(
        "import poptorch, subprocess, sys\n"
        "code = 'import sys; print(1234); sys.exit(3)'\n"
        "subprocess.run([sys.executable, '-c', code], check=True, capture_output=True)"
    )
    assert text.rstrip().endswith("1234")


def test_another_library_s_hook_is_left_alone() -> None:
    text = run(
        "import sys\nsys.excepthook = lambda kind, error, where: sys.stderr.write('mine')\n"
        "import poptorch\nraise ValueError"
    )
    assert text == "mine"


def test_interrupts_look_as_always() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import poptorch\nraise KeyboardInterrupt"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert done.stderr.startswith("Traceback")
    assert "critical" not in done.stderr
