"""Compiled with few of torch's headers, code has the same bits; the headers are safe to read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._inductor.codecache import CppWrapperCodeCache

from helpers.compiled_graphs import Tensors, graph
from poptorch._cpu import headers
from poptorch._cpu.compiler import compile_graph
from poptorch._cpu.toolchain import has_vectors

PREFIX = '#include "torch/csrc/inductor/cpp_prefix.h"\n'
FUNCTIONS = (
    torch.exp,
    torch.exp2,
    torch.expm1,
    torch.erf,
    torch.erfc,
    torch.sigmoid,
    torch.tanh,
    torch.sin,
    torch.cos,
    torch.tan,
    torch.sinh,
    torch.cosh,
    torch.atan,
    torch.asinh,
    torch.floor,
    torch.ceil,
    torch.round,
    torch.trunc,
    torch.frac,
    torch.sign,
    torch.abs,
    torch.neg,
    F.gelu,
    F.silu,
    F.softplus,
    torch.logit,
    torch.isnan,
    torch.logical_not,
)
POSITIVE = (torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt, torch.rsqrt)


def everything(x: torch.Tensor, n: torch.Tensor, y: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Compute what kernels are made of: functions, reductions, indices, types, transposes."""
    row = x.softmax(1) + F.layer_norm(x, (37,)) + n[:, None].float()
    values, places = x.max(1)
    small, picked = n.int() * 3 // 4 % 5, x.index_select(0, n % 9)
    spread = torch.zeros(9, 37).index_put((n % 9,), x, accumulate=True)
    number = torch.stack([x.sum(), x.mean(), x.amin(), x.var(), x.norm(), x[:, :8].prod()])
    reduced = [x.sum(0), x.prod(1), x.argmin(0), x.var(1), x.std(0), (x > 0).any(1), x.cumsum(1)]
    mixed = [torch.where(x > y, x, y), torch.atan2(x, y), torch.fmod(x, y), torch.remainder(x, y)]
    powers = [x.abs() ** 1.7, x**3, torch.hypot(x, y), torch.copysign(x, y), x.clamp(-0.5, 0.5)]
    kinds = [x.double().exp(), small, small.float() * 0.3, x.long(), (x > y) & (n > 3)[:, None]]
    results = [f(x) for f in FUNCTIONS] + [f(x.abs() + 0.1) for f in POSITIVE]
    results += [row, values, places, picked, spread, number, *reduced, *mixed, *powers, *kinds]
    return [*results, (x.t().contiguous() * 2).relu()], []


def some(x: torch.Tensor, n: torch.Tensor, y: torch.Tensor) -> tuple[Tensors, Tensors]:
    """Compute a part of everything, which compiles in a third of the time."""
    picked = x.index_select(0, n % 9)
    return [x.softmax(1), torch.erf(x), torch.where(x > y, x, y), picked, (n * 3 // 4) % 5], []


@pytest.mark.full("compiles with all of torch's headers, which takes seven seconds")
@pytest.mark.parametrize(
    "compute, width",
    [
        pytest.param(some, None, id="some"),
        pytest.param(everything, None, id="everything, widest instructions"),
        pytest.param(everything, 256, id="everything, AVX2"),
    ],
)
def test_results_have_the_same_bits_with_few_headers(
    compute: Callable[..., tuple[Tensors, Tensors]],
    width: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examples = [torch.randn(20, 37), torch.randint(0, 9, (20,)), torch.randn(20, 37)]
    sufficed: list[bool] = []
    refused: list[str] = []
    usual = headers.suffice

    def watched(source: str) -> bool:
        sufficed.append(usual(source))
        return sufficed[-1]

    def results(name: str, folder: Callable[[str], Path | None]) -> Tensors:
        monkeypatch.setattr(headers, "folder", folder)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(CppWrapperCodeCache, "cache", {})
        with torch._inductor.config.patch({"cpp.simdlen": width}):
            code = compile_graph(*graph(compute, examples), examples)
        return [tensor.contiguous() for tensor in code.run(list(examples))]

    monkeypatch.setattr(headers, "_refused", refused)
    monkeypatch.setattr(headers, "suffice", watched)

    with_few = results("few", headers.folder)
    with_all = results("all", lambda _: None)

    assert sufficed == [True] * has_vectors()  # the folder has headers of vectors
    assert refused == []
    for few, every in zip(with_few, with_all, strict=True):
        assert few.dtype == every.dtype
        assert few.numpy().tobytes() == every.numpy().tobytes()


@pytest.mark.parametrize(
    "text",
    [
        "auto tmp1 = at::vec::Vectorized<float>(tmp0).erf();",
        "atomic_add(&out_ptr0[x0], tmp3);",
        "CACHE_TORCH_DTYPE(float32); CACHE_TORCH_DTYPE(bool);",
        "auto operand_half_of = 1;",
    ],
)
def test_a_source_of_loops_over_numbers_needs_few_headers(text: str) -> None:
    assert headers.suffice(f"{PREFIX}{text}\n")


@pytest.mark.parametrize(
    "text",
    [
        "const bfloat16* in_ptr0",
        "CACHE_TORCH_DTYPE(float16);",
        "c10::convert<half>(tmp0);",
        "const uint8_t* in_ptr0",
        "normalized_rand_cpu(tmp0, tmp1);",
        "calc_digamma(tmp0);",
        "tmp0.lgamma();",
        "c10::complex<float> f();",
        "mm_get_thread_blocking(1, 2);",
        "_mm512_fmadd_ps(tmp0, tmp1, tmp2);",
        "RAIIPyObject py_args(PyTuple_New(1));",
        "#include <ATen/ATen.h>",
    ],
)
def test_a_source_that_needs_more_headers_is_recognised_by_its_names(text: str) -> None:
    assert not headers.suffice(f"{PREFIX}{text}\n")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folder, in which a digest of the compiler's headers is always "key"."""
    monkeypatch.setattr(headers, "texts", lambda _: {"folder/own.h": PREFIX})
    monkeypatch.setattr(headers, "has_vectors", lambda: True)
    monkeypatch.setattr(headers, "of_the_user", lambda: tmp_path / "own")
    monkeypatch.setattr(headers, "_digest", lambda _: "key")
    (tmp_path / "own").mkdir()
    return tmp_path / "own"


def test_headers_that_another_process_wrote_in_the_meantime_are_used(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(_: Path) -> dict[str, str]:
        (own_folder / "headers-key" / "of another").mkdir(parents=True)
        return {"own.h": PREFIX}

    monkeypatch.setattr(headers, "texts", texts)

    assert headers.folder("g++") == own_folder / "headers-key"


def test_without_vector_instructions_torchs_headers_are_read(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "has_vectors", lambda: False)
    assert headers.folder("g++") is None


@pytest.mark.parametrize("mask", [0, 0o077], ids=["open to all", "private"])
def test_headers_can_be_written_by_the_user_alone(own_folder: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        place = headers.folder("g++")
    finally:
        os.umask(before)

    assert place is not None
    modes = [path.stat().st_mode & 0o022 for path in (place, *place.rglob("*"))]
    assert modes == [0, 0, 0]


def test_headers_are_written_once(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = headers.folder("g++")
    monkeypatch.setattr(headers, "_write", None)
    assert headers.folder("g++") == place


@pytest.mark.parametrize("spoiled", [".", "folder", "folder/own.h"])
def test_headers_that_somebody_else_may_have_written_are_not_used(
    spoiled: str, own_folder: Path
) -> None:
    place = headers.folder("g++")
    assert place is not None
    (place / spoiled).chmod(0o777)

    assert headers.folder("g++") is None


def test_a_link_in_the_place_of_the_headers_is_not_followed(own_folder: Path) -> None:
    (own_folder.parent / "theirs").mkdir()
    (own_folder / "headers-key").symlink_to("../theirs")

    assert headers.folder("g++") is None


class Builder:
    """A builder of torch's that notes what it was given, and fails while errors are left."""

    def __init__(self, folder: Path, errors: list[Exception]) -> None:
        self._sources_args, self._include_dirs_args = str(folder / "a.cpp"), "-Ia"
        self._cflags_args, self._libraries_args = "-O3 ", "-ltorch -ltorch_cpu -lgomp "
        self._compiler, self._errors = "g++", errors
        self.given: list[tuple[str, str]] = []

    def build(self) -> None:
        self.given.append((self._include_dirs_args, self._libraries_args))
        if self._errors:
            raise self._errors.pop()


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of few headers, which suffices for the source "a.cpp" in it."""
    (tmp_path / "a.cpp").write_text(PREFIX)
    monkeypatch.setattr(headers, "_refused", [])
    monkeypatch.setattr(headers, "folder", lambda _: tmp_path)
    return tmp_path


ALL_HEADERS = ("-Ia", "-ltorch -ltorch_cpu -lgomp ")


def test_a_source_that_fails_with_few_headers_is_compiled_with_all(few: Path) -> None:
    """Torch's headers have changed."""
    builder = Builder(few, [RuntimeError("no such name")])

    headers.build(builder)

    library = f"-Wl,--no-as-needed {few / 'libtorch_python.so'} -lgomp "
    assert builder.given == [(f"-I{few} -Ia", library), ALL_HEADERS]
    assert builder._cflags_args == "-O3 "


def test_after_a_failure_all_sources_are_compiled_with_all_headers(few: Path) -> None:
    headers.build(Builder(few, [RuntimeError("no such name")]))
    later = Builder(few, [])

    headers.build(later)

    assert later.given == [ALL_HEADERS]


def test_a_compiler_that_was_ended_is_not_started_with_other_headers(few: Path) -> None:
    builder = Builder(few, [RuntimeError("killed")])

    with pytest.raises(RuntimeError, match="killed"):
        headers.build(builder, lambda: True)

    assert len(builder.given) == 1
    assert headers._refused == []  # these headers are not at fault
