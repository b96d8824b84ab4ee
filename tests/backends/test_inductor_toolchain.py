"""What is missing on a machine, or fails there, is said in the user's words."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.exc import CppCompileError

import poptorch
from helpers.inductor_graphs import graph
from poptorch.backends.inductor import compiler, toolchain

pytestmark = pytest.mark.slow


def test_a_torch_in_a_folder_with_spaces(monkeypatch) -> None:
    monkeypatch.setattr(torch, "__file__", "/home/me/my projects/torch/__init__.py")
    assert "'/home/me/my projects/torch'" in toolchain.obstacle()


def test_no_obstacle(monkeypatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: "/usr/bin/" + name)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr(torch, "__file__", "/usr/lib/torch/__init__.py")
    monkeypatch.setattr(toolchain, "temporary", lambda: "/tmp")
    assert toolchain.obstacle() is None


def test_a_complaint_of_the_compiler(monkeypatch) -> None:
    def full_disk(*arguments: object, **options: object) -> None:
        said = "a.cpp: In function 'kernel':\na.cpp:3:7: fatal error: No space left on device\n"
        raise CppCompileError(["g++", "a.cpp", "-O3"], said)

    monkeypatch.setattr(compiler, "_compile", full_disk)
    x = torch.ones(3)
    with pytest.raises(poptorch.Error) as caught:
        compiler.compile_graph(graph(lambda x: ([x + 1], []), [x]), [x])
    assert caught.value.message.splitlines() == [
        "The C++ compiler failed",
        "  Got:    a.cpp:3:7: fatal error: No space left on device",
        "  Where:  code that torch generated, compiled by g++",
        "  Fix:    see whether the compiler, its disk space and its memory are in order",
        '  Fix:    options.backend("reference") runs the model without compiled code',
    ]
    assert caught.value.__suppress_context__


def test_other_errors_stay_as_they_are(monkeypatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(compiler, "_compile", broken)
    x = torch.ones(3)
    with pytest.raises(ZeroDivisionError, match="ours"):
        compiler.compile_graph(graph(lambda x: ([x + 1], []), [x]), [x])
