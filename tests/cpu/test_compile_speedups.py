"""What replaces functions of torch's compiler to save time gives what those functions give."""

import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import sympy
import torch
from torch import nn
from torch._inductor import cpp_builder
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import serialized_patterns
from torch._inductor.sizevars import SizeVarAllocator, stride_at_vec_range
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._sympy.functions import FloorDiv, ModularIndexing
from torch.utils._sympy.value_ranges import ValueRanges

from helpers.patience import eventually
from helpers.wrapping import Having, normal, options, training
from poptorch._cpu import compile_speedups, headers

D0, D1, S0 = (sympy.Symbol(name, integer=True, nonnegative=True) for name in ("d0", "d1", "s0"))
SUMS = [
    (D0, 1),
    (32400 * D0 + 144 * D1 + 16, 32400),
    (3 * D0 + 2 * (D0 + D1), 5),
    (FloorDiv(D1, 4) + 7 * D0, 7),
    (-D0 + 9, -1),
    (S0 * D0 + D1, S0),
    (64 * S0 * D0 - 3 * D0 + S0 * D1, 64 * S0 - 3),
    (D0 * D1, D1),
]
IN_A_VECTOR = [
    FloorDiv(D0, 32) + D0,
    3 * ModularIndexing(D0, 1, 16) + 2 * D0,
    5 * ModularIndexing(D0, 48, 3),
    D1 + 16 * FloorDiv(D0, 4),
    FloorDiv(D0, 8) + ModularIndexing(D0, 1, 8),
    -FloorDiv(D0, 16) + D0,
]
OTHERS = [ModularIndexing(ModularIndexing(D0, 1, 9), 1, 3), S0 * FloorDiv(D0, S0), D0 * (D0 + 1)]


def refuse(*arguments: object) -> None:
    raise AssertionError(f"torch was asked: {arguments}")


@pytest.mark.parametrize(("index", "expected"), SUMS)
@pytest.mark.parametrize("length", [None, 16])
def test_the_stride_of_a_sum_of_variables_is_known_without_torch(
    index: sympy.Expr, expected: Any, length: int | None
) -> None:
    assert compile_speedups.stride(refuse, index, D0, length) == expected
    assert stride_at_vec_range(index, D0, length) == expected


@pytest.mark.parametrize("index", IN_A_VECTOR)
def test_the_stride_of_quotients_and_remainders_is_known_without_torch(index: sympy.Expr) -> None:
    ours = compile_speedups.stride(refuse, index, D0, 16)

    torchs = stride_at_vec_range(index, D0, 16)
    assert sympy.simplify(ours - torchs) == 0
    assert ours.is_number == torchs.is_number
    assert ours.has(D0) == torchs.has(D0)


@pytest.mark.parametrize("index", OTHERS)
def test_the_stride_of_another_index_is_the_one_that_torch_computes(index: sympy.Expr) -> None:
    def usual(*arguments: object) -> object:
        return "torch's", arguments

    assert compile_speedups.stride(usual, index, D0, 16) == ("torch's", (index, D0, 16))


def test_torchs_headers_and_libraries_are_where_torch_says() -> None:
    ours = compile_speedups.replacements()["get_torch_related_args"](refuse, False, False)
    assert ours == cpp_builder._get_torch_related_args(False, False)


def test_a_cpu_needs_the_headers_and_libraries_that_torch_says() -> None:
    replacement = compile_speedups.replacements()["get_cpp_torch_device_options"]
    ours = replacement(refuse, device_type="cpu", aot_mode=False, compile_only=False)
    assert ours == cpp_builder.get_cpp_torch_device_options("cpu")


def test_torch_is_asked_what_other_devices_need() -> None:
    replacement = compile_speedups.replacements()["get_cpp_torch_device_options"]
    assert replacement(lambda *asked: asked, "cuda") == ("cuda", False, False)


@pytest.mark.parametrize("limits", [(0, 9), (-1.5, 2.5), (0, sympy.oo), (-sympy.oo, sympy.oo)])
def test_the_values_in_two_equal_ranges_are_the_range(limits: tuple[Any, Any]) -> None:
    ours = compile_speedups.tighten(refuse, ValueRanges(*limits), ValueRanges(*limits))
    assert ours == ValueRanges(*limits).tighten(ValueRanges(*limits))


def test_torch_computes_the_values_in_two_different_ranges() -> None:
    ranges = ValueRanges(0, 9), ValueRanges(3, 12)
    assert compile_speedups.tighten(ValueRanges.tighten, *ranges) == ValueRanges(3, 9)


D2 = FloorDiv(D0, 12) * 12 + ModularIndexing(D0, 3, 4)


@pytest.mark.parametrize("index", [*(index for index, _ in SUMS), *OTHERS, D2, (D0 + 2) * (D1 + 3)])
def test_indices_are_simplified_as_torch_does(index: sympy.Expr) -> None:
    sizes, ranges = SizeVarAllocator(), {D0: sympy.Integer(12), D1: sympy.Integer(4)}
    usual = SizeVarAllocator._simplify_with_ranges
    refusing = usual if index.has(sympy.Function) else refuse
    assert compile_speedups.simplify(refusing, sizes, index, ranges) == usual(sizes, index, ranges)


def test_torch_does_not_simplify_symbolic_indices_that_have_no_quotients_left() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    index = FloorDiv(8 * D1 + 32 * D0, 32 * size)
    ranges = {D0: size, D1: sympy.Integer(4)}

    assert compile_speedups.simplify(refuse, SizeVarAllocator(), index, ranges) == 0


def traced(function: Callable[..., Any]) -> torch.fx.Graph:
    return make_fx(function, dict(select_decomp_table()))(torch.rand(4, 4)).graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: (x @ x).softmax(1) @ x, True),
        (lambda x: x[torch.randperm(4)[:2]], True),
        (lambda x: torch.nn.functional.cross_entropy(x, x.argmax(1)), False),
        (lambda x: x / 2, False),
    ],
)
def test_patterns_are_traced_only_if_one_may_apply(
    function: Callable[..., Any], expected: bool
) -> None:
    assert compile_speedups.patterns(traced(function))["lazy_init"](lambda: True) == (
        expected or None
    )


@pytest.mark.parametrize("file", sorted(Path(serialized_patterns.__path__[0]).glob("_sfdp*.py")))
def test_every_pattern_of_attention_has_a_softmax(file: Path) -> None:
    assert re.search(r" = CallFunction\(aten.div.Tensor, exp_default", file.read_text())


class Residual(nn.Module):
    """Two convolutions with group norms, and a way past them."""

    def __init__(self, given: int, made: int, step: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, step, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, made) for _ in range(2))
        self.past = nn.Conv2d(given, made, 1, step) if given != made else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.norms[0](self.first(x)))
        return torch.relu(self.norms[1](self.second(inner)) + self.past(x))


def test_loops_are_split_as_torch_does() -> None:
    split = compile_speedups.split_if_equal(
        lambda scheduling, nodes: ["split", *nodes], None, ["loop"]
    )
    assert split == ["split", "loop"]


def test_loops_are_not_split_if_torch_raises_an_assertion_error() -> None:
    def torchs(scheduling: object, nodes: list[str]) -> list[str]:
        raise AssertionError

    assert compile_speedups.split_if_equal(torchs, None, ["loop"]) == ["loop"]


@pytest.mark.larger("test_loops_are_not_split_if_torch_raises_an_assertion_error")
def test_loops_that_torch_cannot_split_in_the_same_way_are_compiled_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A test whose code would be interpreted fails."""
    refused: list[AssertionError] = []

    def watched(usual: Callable[..., Any], self: Any, nodes: Any) -> Any:
        def torchs(*arguments: Any) -> Any:
            try:
                return usual(*arguments)
            except AssertionError as error:
                refused.append(error)
                raise

        return split(torchs, self, nodes)

    split = compile_speedups.split_if_equal
    monkeypatch.setattr(compile_speedups, "split_if_equal", watched)
    layers = nn.Conv2d(3, 32, 3, 1, 1), Residual(32, 64, 2), Residual(64, 128, 2)
    classifier = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))
    net = Having(
        lambda net, x, y: nn.functional.cross_entropy(net.classifier(x), y), classifier=classifier
    )
    executor = training(net, options("inductor"))

    executor(normal(4, 3, 32, 32), torch.arange(4))

    assert executor._executable.report().backend == "inductor"
    assert refused, "torch can split these loops"


class Slow:
    """A builder of torch whose compiler never ends and has a child process."""

    def __init__(self, folder: Path, name: str) -> None:
        self._sources_args, self._compiler = str(folder / f"{name}.cpp"), "g++"
        self._begun = folder / f"{name}.begun"

    def build(self) -> None:
        script = 'echo x >> "$1.begun"; while :; do sleep 0.1; done'
        name = self._begun.with_suffix("")
        command = ["sh", "-c", script, "c++", str(name), self._sources_args]
        subprocess.run(command, check=True)


@pytest.mark.slow
def test_an_interrupt_ends_the_compilers_of_all_sources_and_starts_none_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "folder", lambda _: None)
    builders = [Slow(tmp_path, name) for name in ("a", "b")]
    main = threading.get_ident()

    def press() -> None:
        assert eventually(lambda: all(each._begun.exists() for each in builders))
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        compile_speedups.build_together(builders)
    thread.join()

    assert [each._begun.read_text() for each in builders] == ["x\n", "x\n"]
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [words for words in left if "sleep" in words or str(tmp_path) in " ".join(words)]
