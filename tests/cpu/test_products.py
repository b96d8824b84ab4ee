"""Products by either library: the same numbers; which, is measured once."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.cases import few
from helpers.compiled_graphs import Tensors, check
from helpers.wrapping import Regression, normal, options, training
from poptorch._compile import cache
from poptorch._cpu import Inductor, libraries, products, toolchain

pytestmark = pytest.mark.slow
TRIED = libraries.ONEDNN, libraries.LOOPS


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Torch keeps compiled graphs, whoever was chosen for them."""
    from torch._inductor import config

    monkeypatch.setattr(libraries, "_known", {})
    with config.patch(fx_graph_cache=False):
        yield


def step(
    w: torch.Tensor, x: torch.Tensor, g: torch.Tensor, b: torch.Tensor
) -> tuple[Tensors, Tensors]:
    """All layouts of a linear layer's products, with a bias and without."""
    everything = [
        torch.addmm(b, x, w.t()),  # forward
        g @ w,  # the input's gradient
        torch.addmm(g, x, w.t()),  # what is added is a matrix
        torch.addmm(b, x, w.t(), alpha=2.0),
        (x.t() @ g).t(),
        x[:, 3:40] @ w.t()[3:40].relu(),
        x[:, :1].expand(-1, 64) @ w.t()[:64],  # overlaps in memory
        torch.addmm(b, x[:1].exp(), w.t()).relu(),  # loops
        x[:1].double() @ w.t().double(),
        torch.addmm(b, x[:1], w.t(), beta=0.5),
        x[:1, :8] @ w.t()[:8],
        torch.mm(x[0:0], w.t()),
    ]
    return everything, [w - 0.1 * (g.t() @ x)]


@pytest.mark.parametrize("chosen", few([libraries.BLAS, *TRIED], *TRIED))
def test_both_libraries_compute_the_same(monkeypatch: pytest.MonkeyPatch, chosen: str) -> None:
    from torch._inductor.lowering import lowerings

    def torchs() -> dict[Callable[..., Any], Callable[..., Any]]:
        return {op: how for op, how in lowerings.items() if "poptorch" not in str(op)}

    asked, before = [], torchs()

    def choose(a: libraries.Matrix, b: libraries.Matrix) -> str | None:
        asked.append((a, b))
        return chosen if libraries._lies(a) and libraries._lies(b) and all(a[0]) else None

    monkeypatch.setattr(products, "library_of", choose)
    check(step, [torch.randn(shape) for shape in [(96, 128), (64, 128), (64, 96), (96,)]])
    assert any(a[1][0] == 1 for a, _ in asked)
    assert any(b[1][0] == 1 for _, b in asked)
    assert torchs() == before


@pytest.mark.parametrize("a,b,expected", [
    (((512, 256), (256, 1)), ((256, 1000), (1, 256)), "512x256x1024 nt"),  # a forward pass
    (((784, 512), (1, 784)), ((512, 256), (256, 1)), "768x512x256 tn"),  # a weight's gradient
    (((9000, 768), (768, 1)), ((768, 50257), (50257, 1)), "2048x768x2048 nn"),  # as large as needed
    (((1, 1024), (1024, 1)), ((1024, 512), (1, 1024)), "1x1024x512 nt"),  # loops, or a library
    (((2, 1024), (1024, 1)), ((1024, 1024), (1, 1024)), None),  # little work
    (((512, 256), (0, 1)), ((256, 1024), (1, 256)), None),  # rows that lie on each other
    (((512, 256), (512, 2)), ((256, 1024), (1, 256)), None),  # with gaps
    (((512, 256), (256, 1)), ((256, 1024), (1, 0)), None),
])  # fmt: skip
def test_sizes_and_layouts_make_a_class(
    a: tuple[tuple[int, int], tuple[int, int]],
    b: tuple[tuple[int, int], tuple[int, int]],
    expected: str | None,
) -> None:
    shape = libraries.shape_of(a, b)
    assert (shape and str(shape)) == expected
    with products.choosing({} if shape is None else {shape: "the table's"}):
        assert products.library_of(a, b) == (shape and "the table's")
    assert products.library_of(a, b) == (shape and libraries.by_rule(shape))


@pytest.mark.parametrize(
    "shape, library",
    [
        ((128, 256, 512, "nt"), libraries.ONEDNN),
        ((128, 256, 384, "nt"), libraries.BLAS),
        ((96, 256, 512, "nt"), libraries.BLAS),
        ((4, 512, 512, "nn"), libraries.ONEDNN),
    ],
)
def test_a_rule_decides_about_what_was_not_measured(
    shape: tuple[int | str, ...], library: str
) -> None:
    assert libraries.by_rule(libraries.Shape(*shape)) == library


def trained() -> poptorch.PoplarExecutor:
    wrapped = training(Regression(512, 256), options("optimise"))
    wrapped.compile(normal(64, 512), normal(64, 256))
    return wrapped


def test_what_is_measured_once_is_in_plan_and_key_and_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    faster, measured = {libraries.BLAS: 1.0, libraries.ONEDNN: 0.8}, list[str]()
    monkeypatch.setattr(libraries, "times_of", lambda one: measured.append(str(one)) or faster)
    plan = trained().plan()
    assert sorted(measured) == ["256x64x512 tn"] * 2 + ["64x512x256 nt"] * 2
    assert "products computed by oneDNN: [64, 512] x [512, 256], [256, 64] x [64, 512]" in str(plan)
    assert "without an optimisation" not in caplog.text
    faster[libraries.ONEDNN] = 1.2
    for _ in range(2):  # this process, and one that finds the table
        assert trained().plan().libraries == plan.libraries
        monkeypatch.setattr(libraries, "_known", {})
    assert len(measured) == 4
    (graph,) = plan.program.graphs.values()
    key = cache.key_of(graph, Inductor())
    assert "MKL; oneDNN takes 1.2" in libraries.calibrate()[libraries.Shape(64, 512, 256, "nt")]
    assert cache.key_of(graph, Inductor()) != key
    assert "products computed by MKL: [64, 512]" in str(trained().plan())


@pytest.mark.parametrize("shape, other, times, taken", [
    ((64, 512, 256, "nt"), libraries.ONEDNN, [0.5, 1.0], libraries.BLAS),  # disturbed once
    ((1, 512, 512, "nt"), libraries.LOOPS, [0.95], libraries.BLAS),
    ((1, 512, 512, "nt"), libraries.LOOPS, [0.85], libraries.LOOPS),
    ((128, 256, 512, "nt"), libraries.ONEDNN, [], libraries.ONEDNN),  # measuring fails: the rule's
    ((64, 512, 256, "np"), libraries.ONEDNN, [1.05], libraries.ONEDNN),
    ((128, 512, 256, "np"), libraries.ONEDNN, [0.95], libraries.BLAS),
])  # fmt: skip
def test_what_is_clearly_faster_twice_is_taken(
    shape: tuple[int | str, ...],
    other: str,
    times: list[float],
    taken: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    share, made = itertools.cycle(times), libraries.Shape(*shape)
    later, matrix = made._replace(columns=2 * made.columns), libraries.Shape(65, 512, 512, "nt")
    monkeypatch.setattr(libraries, "SECONDS", 0.2)  # enough for the first, and not for others
    monkeypatch.setattr(
        libraries,
        "times_of",
        lambda _: time.sleep(0.2) or {libraries.BLAS: 1.0, other: next(share)},
    )
    found = libraries.chosen(Counter({made: 3, later: 2, matrix: 1}), True)
    alike = shape[0] > 1 and shape[3] == "nt"
    assert found == {made: taken, later: taken, matrix: taken if alike else libraries.ONEDNN}


@pytest.mark.parametrize(
    "shape, alone",
    [
        ((1, 512, 512, "nt"), 0),
        ((8, 512, 512, "nt"), 0),
        ((8, 512, 512, "np"), 0),
        ((128, 512, 512, "nt"), 1),
    ],
)
def test_few_rows_are_measured_with_weights_that_no_cache_of_a_core_holds(
    shape: tuple[int | str, ...], alone: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiply, read = torch.mm, dict[int, int]()
    monkeypatch.setattr(
        torch,
        "mm",
        lambda a, b, out: read.update({b.data_ptr(): b.nbytes}) or multiply(a, b, out=out),
    )
    libraries.times_of(libraries.Shape(*shape))
    assert len(read) == 1 if alone else sum(read.values()) >= 16 << 20


@pytest.mark.parametrize(
    "threads, cores, clock",
    [
        (1, 1.0, "thread_time"),
        (2, 1.9, "perf_counter"),
        (2, 1.0, "thread_time"),
    ],
)
def test_times_are_of_both_libraries_and_leave_threads_alone(
    threads: int, cores: float, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a neighbour has cores, by the time of one thread."""
    in_turn, clocks = libraries._in_turn, []
    monkeypatch.setattr(libraries, "_cores", lambda runs: cores)
    monkeypatch.setattr(libraries, "_in_turn", lambda *a: clocks.append(a[1]) or in_turn(*a))
    torch.set_num_threads(threads)
    times = libraries.times_of(libraries.Shape(64, 512, 256, "nt"))
    assert torch.get_num_threads() == threads
    assert [each.__name__ for each in clocks] == [clock]
    assert sorted(times) == sorted([libraries.BLAS, libraries.ONEDNN])
    assert all(0 < seconds < float("inf") for seconds in times.values())


def test_code_for_one_processor_is_not_used_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    names, tables = set(), set()
    processors = [("A", "fma avx2"), ("B", "fma avx2"), ("A", "fma"), ("", "")]
    capabilities = ("DEFAULT", "AVX2", "AVX512")  # which ATEN_CPU_CAPABILITY can choose, too
    for (model, flags), capability in itertools.product(processors, capabilities):
        facts = {"model name": model, "flags": flags}
        monkeypatch.setattr(toolchain, "_facts", lambda facts=facts: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        names.add(toolchain.instructions())
        tables.add(libraries.Table().conditions)
    assert len(names) == 3 * 3
    assert len(tables) == 4 * 3
