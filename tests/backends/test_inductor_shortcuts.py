"""What is taken for granted about the machine, and what happens where it is not so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor.exc import CppCompileError

import poptorch
from helpers.wrapped import normal, options
from poptorch._compile import code
from poptorch.backends.inductor import compiler, processor

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("capability", "known"), [("AVX512", True), ("AVX2", True), ("DEFAULT", False), ("Z", False)]
)
def test_vectors_are_tried_out_where_aten_uses_none(capability, known, monkeypatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert processor.has_vectors() is known
    assert compiler._shortcuts() == ({"cpp.vec_isa_ok": True} if known else {})


def test_a_compiler_that_does_not_know_the_instructions(
    tmp_path: Path, monkeypatch, caplog
) -> None:
    """The reference backend runs the program, and the warning quotes the compiler."""

    def old(*arguments: object, **options: object) -> None:
        said = "g++: error: unrecognized command-line option '-mavx512f'\n"
        raise CppCompileError(["g++", "a.cpp"], said)

    monkeypatch.setattr(compiler, "_compile", old)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = poptorch.inferenceModel(nn.Linear(4, 2), options().backend("optimise"))
    x = normal(3, 4)
    torch.testing.assert_close(model(x), model.model(x))
    assert model._executable.report().backend == "reference"
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "unrecognized command-line option" in warning
