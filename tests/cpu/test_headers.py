"""What compiled code is made of: few headers, kernels that Python calls, attention's products."""

import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch._inductor.codecache import CppWrapperCodeCache
from torch.fx.experimental.proxy_tensor import make_fx

from helpers.compiled_graphs import Tensors, check, graph
from helpers.patience import eventually
from poptorch._cpu import headers, kernels, shortcuts
from poptorch._cpu.compiler import compile_graph, rules
from poptorch._cpu.lowering import fakes, lower
from poptorch._cpu.products import LONGEST, attention, attention_backward
from poptorch._cpu.toolchain import has_vectors

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
def test_the_same_bits_with_few_headers(
    width: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    "auto tmp1 = at::vec::Vectorized<float>(tmp0).erf();",
    "atomic_add(&out_ptr0[x0], tmp3);",
    "CACHE_TORCH_DTYPE(float32); CACHE_TORCH_DTYPE(bool);",
    "auto operand_half_of = 1;",
)
BEYOND = (
    "const bfloat16* in_ptr0", "CACHE_TORCH_DTYPE(float16);", "c10::convert<half>(tmp0);",
    "const uint8_t* in_ptr0", "normalized_rand_cpu(tmp0, tmp1);", "calc_digamma(tmp0);",
    "tmp0.lgamma();", "c10::complex<float> f();", "mm_get_thread_blocking(1, 2);",
    "_mm512_fmadd_ps(tmp0, tmp1, tmp2);",
    "RAIIPyObject py_args(PyTuple_New(1));", "#include <ATen/ATen.h>",
)  # fmt: skip


def test_another_process_may_have_written_them_by_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def texts(_: Path) -> dict[str, str]:
        (tmp_path / "headers-key" / "of another").mkdir(parents=True)
        return {"own.h": ALL}

    monkeypatch.setattr(headers, "texts", texts)
    monkeypatch.setattr(headers, "of_the_user", lambda: tmp_path)
    monkeypatch.setattr(headers, "_digest", lambda _: "key")
    assert headers.folder("g++") == (tmp_path / "headers-key" if has_vectors() else None)


@pytest.mark.parametrize("open_to_all", [False, True])
def test_headers_are_written_for_the_user_alone(
    open_to_all: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "texts", lambda _: {"folder/own.h": ALL})
    monkeypatch.setattr(headers, "has_vectors", lambda: True)
    monkeypatch.setattr(headers, "of_the_user", lambda: tmp_path)
    before = os.umask(0 if open_to_all else 0o077)
    try:
        place = headers.folder("g++")
    finally:
        os.umask(before)

    assert place is not None
    assert [path.stat().st_mode & 0o022 for path in (place, *place.rglob("*"))] == [0, 0, 0]
    assert headers.folder("g++") == place


@pytest.mark.parametrize("spoiled", [".", "folder", "folder/own.h"])
def test_headers_that_somebody_else_may_have_written_are_not_used(
    spoiled: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headers, "texts", lambda _: {"folder/own.h": ALL})
    monkeypatch.setattr(headers, "has_vectors", lambda: True)
    monkeypatch.setattr(headers, "of_the_user", lambda: tmp_path)
    place = headers.folder("g++")
    assert place is not None
    (place / spoiled).chmod(0o777)

    assert headers.folder("g++") is None


def test_a_link_in_the_place_of_the_headers_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "headers-key").symlink_to("../theirs")
    monkeypatch.setattr(headers, "has_vectors", lambda: True)
    monkeypatch.setattr(headers, "of_the_user", lambda: tmp_path / "own")
    monkeypatch.setattr(headers, "_digest", lambda _: "key")

    assert headers.folder("g++") is None


@pytest.mark.parametrize("text", ENOUGH + BEYOND)
def test_what_more_a_source_needs_is_told_by_name(text: str) -> None:
    assert headers.suffice(f"{ALL}{text}\n") is (text in ENOUGH)


def test_a_release_with_other_headers_is_compiled_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_compiler_that_was_ended_is_not_started_with_other_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Builder:
        _sources_args, _include_dirs_args, _cflags_args = str(tmp_path / "a.cpp"), "-Ia", "-O3 "
        _compiler, _libraries_args = "g++", "-ltorch -ltorch_cpu -lgomp "

        def build(self) -> None:
            tried.append(1)
            raise RuntimeError("killed")

    tried: list[int] = []
    refused: list[str] = []
    monkeypatch.setattr(headers, "_refused", refused)
    monkeypatch.setattr(headers, "folder", lambda _: tmp_path)

    with pytest.raises(RuntimeError, match="killed"):
        headers.build(Builder(), lambda: True)

    assert tried == [1]
    assert refused == []  # these headers are not at fault


@torch.library.custom_op("poptorch_test_kernels::twice", mutates_args=())
def twice(x: torch.Tensor) -> list[torch.Tensor]:
    """A result that C++ cannot take from an operator."""
    return [x * 2]


twice.register_fake(lambda x: [torch.empty_like(x)])


def step(x: torch.Tensor, n: torch.Tensor) -> tuple[Tensors, Tensors]:
    between = twice(torch.tanh(x).softmax(1))[0]
    return [twice(between.sin() + n[:, None])[0].sum(0), (n * 3).relu()], [x + between]


@pytest.mark.slow
def test_one_run_for_all_kernels_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[int] = []
    load = kernels._load

    def counted(sources: list[str], first: int) -> Any:
        loaded.append(len(sources))
        return load(sources, first)

    monkeypatch.setattr(kernels, "_load", counted)
    check(step, [torch.randn(5, 33), torch.arange(5)])
    assert len(loaded) == 1
    assert loaded[0] >= 3


@pytest.mark.parametrize(
    "source",
    [
        'static int helper; extern "C" void kernel(float* a) {}',
        'extern "C" void other(float* a) {}',
    ],
)
def test_other_sources_are_left_to_torch(source: str) -> None:
    asked = kernels.together()(lambda *arguments: arguments, "self", ["float*"], source)
    assert asked == ("self", ["float*"], source)


aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
THEIRS = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
BATCH, HEADS, ROWS, WIDTH = 2, 3, 9, 8


def operands(columns: int) -> list[torch.Tensor]:
    """Query, key and value in the strides that models give them."""
    torch.manual_seed(0)
    shapes = [(BATCH, rows, HEADS, WIDTH) for rows in (ROWS, columns, columns)]
    return [torch.randn(shape).bfloat16().transpose(1, 2) for shape in shapes]


def mask(kind: str | None, columns: int) -> torch.Tensor | None:
    if kind is None:
        return None
    hidden = torch.zeros(BATCH, 1, ROWS, columns, dtype=torch.bfloat16)
    hidden[0, 0, :, 2] = float("-inf")
    if kind == "nothing to be seen":
        hidden[1, 0, 4, :] = float("-inf")
    return hidden


@pytest.mark.parametrize("columns", [ROWS, 12])
@pytest.mark.parametrize("kind", [None, "causal", "some", "nothing to be seen"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_gradients(columns: int, kind: str | None, scale: float | None) -> None:
    causal = kind == "causal"
    shown, tensors = mask(None if causal else kind, columns), operands(columns)
    options = {"attn_mask": shown, "scale": scale}
    out, logsumexp = FORWARD(*tensors, 0.0, causal, **options)
    grad = torch.randn_like(out)
    args = (grad, *tensors, out, logsumexp, 0.0, causal)
    ours, theirs = attention_backward(*args, **options), THEIRS(*args, **options)
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    wide = None if shown is None else shown.double()
    result = F.scaled_dot_product_attention(*exact, attn_mask=wide, is_causal=causal, scale=scale)
    truth = torch.autograd.grad(result, exact, grad.double())
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == right.shape
        assert (one.double() - right).abs().max() <= 2 * (other.double() - right).abs().max()


@pytest.mark.parametrize("kind", [None, "some", "nothing to be seen"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_one_query_is_loops(kind: str | None, scale: float | None) -> None:
    queries, *others = (tensor.float() for tensor in operands(12))
    shown, query = mask(kind, 12), queries[:, :, 4:5]
    options = {"attn_mask": None if shown is None else shown[:, :, 4:5].float(), "scale": scale}
    torch.testing.assert_close(
        attention(query, *others, **options), FORWARD(query, *others, **options)
    )
    left = (queries, *others), (query, *others, 0.0, True), (query, *others, 0.1)
    assert all(attention(*each, **options) is NotImplemented for each in left)
    fewer = (each[:, :1] for each in others)
    assert attention(query, *fewer) is attention(*operands(12)) is NotImplemented


@pytest.mark.slow
def test_compiled_code_has_it() -> None:
    query, key, value = operands(ROWS)
    inputs = (query, query, key, value, query, query[..., 0].float())
    given = make_fx(lambda *t: tuple(THEIRS(*t, 0.0, False)), tracing_mode="fake")(*inputs)
    mode, fake = fakes(inputs)
    with mode:
        lowered = lower(given, [], fake, rules(given.graph), {})
    assert not lowered.graph.find_nodes(op="call_function", target=THEIRS)
    assert len(lowered.graph.find_nodes(op="call_function", target=aten.bmm.default)) == 5
    assert rules(given.graph)[FORWARD] is attention


def test_what_is_left_to_the_library() -> None:
    query, key, value = operands(ROWS)
    rows = query[:, :, :, 0].float()
    for dtype in (torch.float32, torch.float64):
        wide = [tensor.to(dtype) for tensor in (query, query, key, value, query)]
        assert attention_backward(*wide, rows, 0.0, False) is NotImplemented
    long = torch.zeros(1, 1, LONGEST + 1, WIDTH, dtype=torch.bfloat16)
    rest = (long, long, long[..., 0].float(), 0.0, False)
    assert attention_backward(long, long, long, *rest) is NotImplemented
    fewer = (query, key[:, :1], value[:, :1], query, rows, 0.0, False)
    assert attention_backward(query, *fewer) is NotImplemented


class Slow:
    """A builder of torch's whose compiler never ends, as a process that has one of its own."""

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
        shortcuts.build_together(builders)
    thread.join()

    assert [each._begun.read_text() for each in builders] == ["x\n", "x\n"]
    left = [process.cmdline() for process in psutil.Process().children(recursive=True)]
    assert not [words for words in left if "sleep" in words or str(tmp_path) in " ".join(words)]
