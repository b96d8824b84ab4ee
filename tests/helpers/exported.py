"""Exported files: their style, and what they compute in a process that has no poptorch."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def check_style(file: Path) -> None:
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--config", PROJECT, "--no-cache", file]
        done = subprocess.run(ruff, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def loaded(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def alone() -> None:
    """Let this process import no poptorch."""
    torch.set_num_threads(1)
    assert not [name for name in sys.modules if name.partition(".")[0] == "poptorch"]
    sys.modules["poptorch"] = None  # type: ignore[assignment]


def run(file: Path) -> None:
    """Save results of ``step`` for the batches that were saved, and the weights after them."""
    module = loaded(file)
    state, _ = module.load(file.with_suffix(".safetensors"))
    results = [module.step(*state, *batch) for batch in torch.load(file.with_suffix(".batches"))]
    torch.save((results, of_model(module, state)), file.with_suffix(".out"))


def of_model(module: ModuleType, state: Any) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers of a state."""
    names = module.step.__wrapped__.__code__.co_varnames
    dicts = [d for name, d in zip(names, state, strict=False) if name in ("p", "b")]
    return {key: value for each in dicts for key, value in each.items()}
