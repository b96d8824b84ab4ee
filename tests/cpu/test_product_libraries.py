"""Which library computes a product is measured once for each class of shapes, and remembered."""

import itertools
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers.wrapping import Regression, normal, options, training
from poptorch._compile import cache
from poptorch._cpu import Inductor, product_libraries, toolchain
from poptorch._cpu.product_libraries import BLAS, LOOPS, ONEDNN, Shape

Sizes = tuple[int, int]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has measured nothing."""
    monkeypatch.setattr(product_libraries, "_known", {})


@pytest.mark.parametrize(
    "a, b, expected",
    [
        pytest.param(
            ((512, 256), (256, 1)), ((256, 1000), (1, 256)), "512x256x1024 nt", id="forward"
        ),
        pytest.param(
            ((784, 512), (1, 784)), ((512, 256), (256, 1)), "768x512x256 tn", id="weight's gradient"
        ),
        pytest.param(
            ((9000, 768), (768, 1)), ((768, 50257), (50257, 1)), "2048x768x2048 nn", id="largest"
        ),
        pytest.param(
            ((1, 1024), (1024, 1)), ((1024, 512), (1, 1024)), "1x1024x512 nt", id="one row"
        ),
    ],
)
def test_sizes_and_layouts_make_a_class(
    a: tuple[Sizes, Sizes], b: tuple[Sizes, Sizes], expected: str
) -> None:
    assert str(product_libraries.shape_of(a, b)) == expected


@pytest.mark.parametrize(
    "a, b",
    [
        pytest.param(((2, 1024), (1024, 1)), ((1024, 1024), (1, 1024)), id="little work"),
        pytest.param(((512, 256), (0, 1)), ((256, 1024), (1, 256)), id="rows share memory"),
        pytest.param(((512, 256), (512, 2)), ((256, 1024), (1, 256)), id="gaps"),
        pytest.param(((512, 256), (256, 1)), ((256, 1024), (1, 0)), id="columns share memory"),
    ],
)
def test_small_products_and_unusual_layouts_have_no_class(
    a: tuple[Sizes, Sizes], b: tuple[Sizes, Sizes]
) -> None:
    assert product_libraries.shape_of(a, b) is None


@pytest.mark.parametrize(
    "shape, library",
    [
        (Shape(128, 256, 512, "nt"), ONEDNN),
        (Shape(128, 256, 384, "nt"), BLAS),
        (Shape(96, 256, 512, "nt"), BLAS),
        (Shape(4, 512, 512, "nn"), ONEDNN),
    ],
    ids=str,
)
def test_a_rule_decides_about_a_class_that_was_not_measured(shape: Shape, library: str) -> None:
    assert product_libraries.by_rule(shape) == library


class Measured:
    """Measures without measuring: the time assumed for each library, and the requests."""

    def __init__(self) -> None:
        self.seconds = {BLAS: 1.0, ONEDNN: 0.8}
        self.measured_shapes: list[str] = []

    def times_of(self, shape: Shape) -> dict[str, float]:
        self.measured_shapes.append(str(shape))
        return self.seconds


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Measured:
    """No table on disk, and measures that need no time."""
    made = Measured()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(product_libraries, "times_of", made.times_of)
    return made


def trained() -> poptorch.PoplarExecutor:
    wrapped = training(Regression(512, 256), options("optimise"))
    wrapped.compile(normal(64, 512), normal(64, 256))
    return wrapped


@pytest.mark.larger("test_a_library_that_is_clearly_faster_twice_is_taken")
def test_each_class_of_a_program_is_measured_twice_and_then_stays(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG", logger="poptorch:cpp")

    plan = trained().plan()
    measured.seconds[ONEDNN] = 1.2
    of_this_process = trained().plan()
    monkeypatch.setattr(product_libraries, "_known", {})
    of_another_process = trained().plan()

    assert sorted(measured.measured_shapes) == ["256x64x512 tn"] * 2 + ["64x512x256 nt"] * 2
    assert "products computed by oneDNN: [64, 512] x [512, 256], [256, 64] x [64, 512]" in str(plan)
    assert of_this_process.libraries == plan.libraries
    assert of_another_process.libraries == plan.libraries
    assert "without an optimisation" not in caplog.text


def chosen_for(work: dict[Shape, int]) -> dict[Shape, str]:
    return product_libraries.chosen(Counter(work), True)


def test_calibrating_measures_again_and_changes_the_key_of_compiled_code(
    measured: Measured,
) -> None:
    wrapped = training(Regression(512, 256), options("reference"))
    wrapped.compile(normal(64, 512), normal(64, 256))
    (graph,) = wrapped.plan().program.graphs.values()
    key = cache.key_of(graph, Inductor())

    measured.seconds[ONEDNN] = 1.2
    choices = product_libraries.calibrate()

    assert choices[Shape(64, 512, 256, "nt")].startswith(f"{BLAS}; oneDNN takes 1.2")
    assert cache.key_of(graph, Inductor()) != key
    assert product_libraries.described_choices([graph])[0].startswith(
        f"matrix products computed by {BLAS}: [64, 512]"
    )


@pytest.fixture
def time_for_one_class(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A budget that the first class uses up, and shares of BLAS's time that libraries take."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(product_libraries, "SECONDS", 0.2)

    def taking(library: str, shares: list[float]) -> None:
        share = itertools.cycle(shares)

        def times_of(_: Shape) -> dict[str, float]:
            time.sleep(0.2)
            return {BLAS: 1.0, library: next(share)}

        monkeypatch.setattr(product_libraries, "times_of", times_of)

    return taking


def test_the_first_runs_of_a_product_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait for new memory, which the results of one library are in, and not of the others."""
    moments, runs = [0.0], list[float]()

    def run() -> list[None]:
        runs.append(0.02 if len(runs) < 3 else 0.001)
        moments.append(moments[-1] + runs[-1])
        return [None]

    monkeypatch.setattr(time, "perf_counter", lambda: moments[-1])

    times = product_libraries._alternating_times({BLAS: run}, BLAS, lambda: moments[-1])

    assert times[BLAS] == pytest.approx(0.001)


@pytest.mark.parametrize(
    ("seconds", "rounds"),
    [
        pytest.param(0.012, 2, id="clearly slower"),
        pytest.param(0.0105, 3, id="about as fast"),
        pytest.param(0.005, 4, id="faster"),
    ],
)
def test_a_library_that_is_clearly_slower_is_measured_in_fewer_rounds(
    seconds: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    moment, runs = 0.0, Counter[str]()

    def taking(library: str, spent: float) -> Callable[[], list[None]]:
        def run() -> list[None]:
            nonlocal moment
            moment += spent
            runs[library] += 1
            return [None] * product_libraries.WARM_UP

        return run

    libraries = {BLAS: taking(BLAS, 0.01), ONEDNN: taking(ONEDNN, seconds)}
    monkeypatch.setattr(time, "perf_counter", lambda: moment)

    product_libraries._alternating_times(libraries, BLAS, lambda: moment)

    assert runs[ONEDNN] == 1 + rounds


TAKEN = pytest.mark.parametrize(
    "shape, other, shares, taken",
    [
        pytest.param(Shape(64, 512, 256, "nt"), ONEDNN, [0.5, 1.0], BLAS, id="disturbed once"),
        pytest.param(Shape(1, 512, 512, "nt"), LOOPS, [0.95], BLAS, id="hardly faster"),
        pytest.param(Shape(1, 512, 512, "nt"), LOOPS, [0.85], LOOPS, id="clearly faster"),
        pytest.param(Shape(128, 256, 512, "nt"), ONEDNN, [], ONEDNN, id="measuring fails"),
        pytest.param(Shape(64, 512, 256, "np"), ONEDNN, [1.05], ONEDNN, id="few prepared rows"),
        pytest.param(Shape(128, 512, 256, "np"), ONEDNN, [0.98], BLAS, id="prepared, as fast"),
        pytest.param(Shape(128, 512, 256, "np"), ONEDNN, [0.95], ONEDNN, id="prepared, faster"),
    ],
)


@TAKEN
def test_a_library_that_is_clearly_faster_twice_is_taken(
    shape: Shape, other: str, shares: list[float], taken: str, time_for_one_class: Any
) -> None:
    time_for_one_class(other, shares)
    assert chosen_for({shape: 1}) == {shape: taken}


@TAKEN
def test_if_time_is_short_classes_use_the_measured_choice_of_their_kind(
    shape: Shape, other: str, shares: list[float], taken: str, time_for_one_class: Any
) -> None:
    time_for_one_class(other, shares)
    alike = shape._replace(columns=2 * shape.columns)
    several_rows = Shape(65, 512, 512, "nt")
    is_of_that_kind = shape.rows > 1 and shape.layout == "nt"

    found = chosen_for({shape: 3, alike: 2, several_rows: 1})

    assert found[alike] == taken
    assert found[several_rows] == (taken if is_of_that_kind else ONEDNN)


@pytest.fixture
def weights_read(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The bytes of each weight that BLAS reads, by address."""
    multiply, read = torch.mm, dict[int, int]()

    def watched(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        read[b.data_ptr()] = b.nbytes
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", watched)
    return read


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [Shape(1, 512, 512, "nt"), Shape(8, 512, 512, "nt"), Shape(8, 512, 512, "np")],
    ids=str,
)
def test_few_rows_are_measured_with_weights_that_no_cache_of_a_core_holds(
    shape: Shape, weights_read: dict[int, int]
) -> None:
    product_libraries.times_of(shape)
    assert sum(weights_read.values()) >= 16 << 20


@pytest.mark.slow
def test_many_rows_are_measured_with_one_weight(weights_read: dict[int, int]) -> None:
    product_libraries.times_of(Shape(128, 512, 512, "nt"))
    assert len(weights_read) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "threads, cores, clock",
    [
        pytest.param(1, 1.0, "thread_time", id="one thread"),
        pytest.param(2, 1.9, "perf_counter", id="two cores"),
        pytest.param(2, 1.0, "thread_time", id="a neighbour has the other core"),
    ],
)
def test_several_threads_are_measured_only_if_each_has_a_core(
    threads: int, cores: float, clock: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_turn, clocks = product_libraries._alternating_times, []

    def watched(runs: Any, usual: str, clock: Any) -> dict[str, float]:
        clocks.append(clock.__name__)
        return in_turn(runs, usual, clock)

    monkeypatch.setattr(product_libraries, "is_crowded", lambda: False)
    monkeypatch.setattr(product_libraries, "_cores", lambda runs: cores)
    monkeypatch.setattr(product_libraries, "_alternating_times", watched)
    torch.set_num_threads(threads)

    times = product_libraries.times_of(Shape(64, 512, 256, "nt"))

    assert clocks == [clock]
    assert torch.get_num_threads() == threads
    assert sorted(times) == sorted([BLAS, ONEDNN])
    assert all(0 < seconds < float("inf") for seconds in times.values())


def test_a_product_with_several_threads_is_not_tried_while_other_processes_need_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = list[str]()
    monkeypatch.setattr(product_libraries, "is_crowded", lambda: True)
    monkeypatch.setattr(product_libraries, "_cores", lambda runs: tried.append("cores") or 2.0)
    torch.set_num_threads(2)

    product_libraries.times_of(Shape(64, 512, 256, "nt"))

    assert tried == []


def test_each_processor_and_instruction_set_has_its_own_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processors = [("A", "fma avx2"), ("B", "fma avx2"), ("A", "fma"), ("", "")]
    capabilities = ("DEFAULT", "AVX2", "AVX512")  # which ATEN_CPU_CAPABILITY can choose, too
    tables = set()
    for (model, flags), capability in itertools.product(processors, capabilities):
        facts = {"model name": model, "flags": flags}
        monkeypatch.setattr(toolchain, "_facts", lambda facts=facts: facts)
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda c=capability: c)
        tables.add(product_libraries.Table().conditions)

    assert len(tables) == len(processors) * len(capabilities)
