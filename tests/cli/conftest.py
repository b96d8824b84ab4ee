"""What tests of commands need."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Return a function that writes a script, which has imported torch, and returns its path."""

    def write(text: str) -> str:
        file = tmp_path / "script.py"
        file.write_text(f"import sys, torch, poptorch\n{text}")
        return str(file)

    return write


@pytest.fixture
def own_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a system of four IPUs that this test has for itself."""
    monkeypatch.setenv("POPTORCH_POD_DIR", str(tmp_path))
    monkeypatch.setenv("POPTORCH_POD", "4")
    return tmp_path
