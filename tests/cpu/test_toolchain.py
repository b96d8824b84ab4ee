"""What is known about the processor and the C++ compiler."""

import itertools

import pytest
import torch

import poptorch
from helpers.compiled_graphs import graph
from poptorch._cpu import compile_speedups, compiler, toolchain

COMPILER_OUTPUT = "a.cpp: In function 'kernel':\na.cpp:3:7: fatal error: No space left on device\n"
CAPABILITIES = pytest.mark.parametrize(
    "capability, known", [("AVX512", True), ("AVX2", True), ("DEFAULT", False), ("Z", False)]
)


@CAPABILITIES
def test_vectors_are_taken_for_granted_where_aten_uses_them(
    capability: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert toolchain.has_vectors() == known


@CAPABILITIES
def test_torch_tries_vectors_out_where_aten_uses_none(
    capability: str, known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert compile_speedups.settings().get("vec_isa_ok", False) == known
    assert ("check_build" in compile_speedups.replacements()) == known


def test_code_for_one_instruction_set_is_not_used_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model of the processor does not matter."""
    instruction_sets = "fma avx2", "fma", ""
    capabilities = "DEFAULT", "AVX2", "AVX512"  # which ATEN_CPU_CAPABILITY can choose, too
    names = set()
    for model, flags, capability in itertools.product("AB", instruction_sets, capabilities):
        facts = {"model name": model, "flags": flags}
        monkeypatch.setattr(toolchain, "_facts", lambda facts=facts: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        names.add(toolchain.instructions())

    assert len(names) == len(instruction_sets) * len(capabilities)


def compile_and_raise(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(compiler, "_compile", broken)
    x = torch.ones(3)
    compiler.compile_graph(*graph(lambda x: ([x + 1], []), [x]), [x])


@pytest.mark.slow
def test_an_error_of_the_c_plus_plus_compiler_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import CppCompileError

    with pytest.raises(poptorch.Error) as caught:
        compile_and_raise(CppCompileError(["g++", "a.cpp", "-O3"], COMPILER_OUTPUT), monkeypatch)

    assert "Got:    a.cpp:3:7: fatal error: No space left on device" in str(caught.value)
    assert "Where:  g++ failed on code that torch generated" in str(caught.value)


@pytest.mark.slow
def test_any_other_error_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ZeroDivisionError, match="ours"):
        compile_and_raise(ZeroDivisionError("ours"), monkeypatch)
