"""Code that was compiled with few headers computes the same bits."""

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._inductor.codecache import CppWrapperCodeCache

from helpers.inductor_graphs import Tensors, graph
from poptorch.backends.inductor import headers
from poptorch.backends.inductor.compiler import compile_graph
from poptorch.backends.inductor.toolchain import has_vectors

ALL = '#include "torch/csrc/inductor/cpp_prefix.h"\n'
FUNCTIONS = (
    torch.exp, torch.exp2, torch.expm1, torch.erf, torch.erfc, torch.sigmoid, torch.tanh,
    torch.sin, torch.cos, torch.tan, torch.sinh, torch.cosh, torch.atan, torch.asinh, torch.floor,
    torch.ceil, torch.round, torch.trunc, torch.frac, torch.sign, torch.abs, torch.neg, F.gelu,
    F.silu, F.softplus, torch.logit, torch.isnan, torch.logical_not,
)  # fmt: skip
POSITIVE = (torch.log, torch.log1p, torch.log2, torch.log10, torch.sqrt, torch.rsqrt)


def everything(x: torch.Tensor, n: torch.Tensor, y: torch.Tensor) -> tuple[Tensors, Tensors]:
    """What kernels are made of: functions, reductions, indices, kinds of numbers, transposes."""
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


@pytest.mark.slow
@pytest.mark.parametrize("width", [None, 256])
def test_the_same_bits_with_few_headers(width: int | None, tmp_path, monkeypatch) -> None:
    """By the widest instructions that there are, and by AVX2."""
    torch.manual_seed(0)
    examples = [torch.randn(20, 37), torch.randint(0, 9, (20,)), torch.randn(20, 37)]
    got: list[Tensors] = []
    sufficed: list[bool] = []
    refused: list[str] = []
    monkeypatch.setattr(headers, "_refused", refused)
    suffice = headers.suffice
    monkeypatch.setattr(headers, "suffice", lambda s: sufficed.append(suffice(s)) or sufficed[-1])
    for name, folder in {"few": headers.folder, "all": lambda _: None}.items():
        monkeypatch.setattr(headers, "folder", folder)
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / name))
        monkeypatch.setattr(CppWrapperCodeCache, "cache", {})
        with torch._inductor.config.patch({"cpp.simdlen": width}):
            got.append(compile_graph(*graph(everything, examples), examples).run(list(examples)))
    assert sufficed == [True] * has_vectors()  # the folder has headers of vectors
    assert not refused
    few, all_ = ([t.contiguous() for t in results] for results in got)
    for a, b in zip(few, all_, strict=True):
        assert a.dtype == b.dtype
        assert a.numpy().tobytes() == b.numpy().tobytes()


ENOUGH = (
    "auto tmp1 = at::vec::Vectorized<float>(tmp0).erf();", "atomic_add(&out_ptr0[x0], tmp3);",
    "CACHE_TORCH_DTYPE(float32); CACHE_TORCH_DTYPE(bool);", "auto operand_half_of = 1;",
)  # fmt: skip
BEYOND = (
    "const bfloat16* in_ptr0", "CACHE_TORCH_DTYPE(float16);", "c10::convert<half>(tmp0);",
    "const uint8_t* in_ptr0", "normalized_rand_cpu(tmp0, tmp1);", "calc_digamma(tmp0);",
    "tmp0.lgamma();", "c10::complex<float> f();", "mm_get_thread_blocking(1, 2);",
    "_mm512_fmadd_ps(tmp0, tmp1, tmp2);",
    "RAIIPyObject py_args(PyTuple_New(1));", "#include <ATen/ATen.h>",
)  # fmt: skip


@pytest.mark.parametrize("text", ENOUGH + BEYOND)
def test_what_more_a_source_needs_is_told_by_name(text: str) -> None:
    assert headers.suffice(f"{ALL}{text}\n") is (text in ENOUGH)


def test_a_release_with_other_headers_is_compiled_with_all(tmp_path, monkeypatch) -> None:
    class Builder:
        _sources_args, _include_dirs_args, _cflags_args = str(tmp_path / "a.cpp"), "-Ia", "-O3 "
        _compiler, _libraries_args = "g++", "-ltorch -ltorch_cpu -lgomp "

        def build(self) -> None:
            tried.append((self._include_dirs_args, self._libraries_args))
            if len(tried) == 1:
                raise RuntimeError("no such name")

    tried: list[tuple[str, str]] = []
    (tmp_path / "a.cpp").write_text(ALL)
    monkeypatch.setattr(headers, "_refused", [])
    monkeypatch.setattr(headers, "folder", lambda _: tmp_path)
    for _ in range(2):
        builder = Builder()
        headers.build(builder)
        assert builder._cflags_args == "-O3 "
    few = f"-I{tmp_path} -Ia", f"-Wl,--no-as-needed {tmp_path / 'libtorch_python.so'} -lgomp "
    assert tried == [few, *[("-Ia", "-ltorch -ltorch_cpu -lgomp ")] * 2]
