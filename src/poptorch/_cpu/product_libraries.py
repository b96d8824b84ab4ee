"""Choose the library for each large product in float32: measure once per processor, then remember.

Whether ATen's BLAS (MKL) or oneDNN is faster depends on the processor, the sizes, and the layout of
operands. On an AMD EPYC with AVX512, oneDNN takes 0.6 to 1.1 of MKL's time; with only AVX2, 1.3 for
large weights. On an Intel Xeon with AMX, it takes 1.0 to 1.3, and 2.5 for 3072 columns. If both are
about equally fast, ATen is chosen, as in eager torch; for weights that inference prepares, a small
gain suffices. Inductor's own template is for constant weights only, and takes 1.2 to 1.5 of MKL's
time with only AVX2. A product with one row can also be computed by loops. On the EPYC these take
half of MKL's time, and with only AVX2 0.5 to 0.9. With few rows, the product waits for weights that
other layers have driven out of the caches. Measured with such weights, the choice takes 0.84 of the
time for a BERT's row, compared with a choice for weights in the caches.

A table in the user's cache has a row for each class of shapes. The row is written before the first
code for that class is compiled, and does not change, so results are bit-identical on one machine.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from torch import fx

from .._base import archive, log, private
from .._base.errors import described
from .._base.folders import of_the_user
from .._base.process_settings import alone, keep_freed_memory
from .._base.resources import is_crowded
from .._ir.graph import Graph
from .toolchain import instructions, processor

aten = torch.ops.aten

Matrix = tuple[tuple[int, ...], tuple[int, ...]]  # sizes and strides
Trial = Callable[[], Sequence[object]]  # one product for each weight
_HAS_MKL: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
BLAS, ONEDNN = "MKL" if _HAS_MKL else "BLAS", "oneDNN"
TURNED, LOOPS = f"{BLAS} with weights row by row", "loops"

# multiplications; in a smaller product, a call costs more than a faster library saves
SMALLEST = 1 << 22
_SMALLEST_ROW = 1 << 18  # the same for a product with one row
# the largest dimension, and number of multiplications, that are measured
_LONGEST, _LARGEST = 4096, 1 << 32
_MANY_ROWS, _FEWEST_ROWS = 128, 4
LARGE_PRODUCT, LARGE_WEIGHT, _HUGE = 1 << 24, 1 << 18, 1 << 30
# most seconds for all classes of a graph, and for one class after a few rounds
SECONDS, OF_ONE = 0.5, 0.05
ROUNDS = 2, 12  # minimum and maximum number of alternating runs
WARM_UP = 3
"""The number of products before them, if they are short. Results of oneDNN are new tensors. Until
they are in memory that was freed, a run of [512, 256] x [256, 1024] takes 3.6 instead of 2.7 ms,
and 3.0 with MKL.
"""
_PATIENCE = 30.0  # how many seconds to wait for another process that measures
# A library is chosen that twice takes less than this share of the usual one's time. With prepared
# weights, a small gain justifies oneDNN, whose call includes what follows.
_BETTER, _BETTER_PREPARED = 0.9, 0.97
# If no library takes less than this share of the usual one's time, the usual one is chosen after
# ``_ENOUGH`` seconds, because more rounds would hardly change that.
_WORSE, _ENOUGH = 1.1, 0.01
# bytes of weights; when weights of this size are read again, they are no longer in a core's caches
_UNCACHED = 16 << 20
_ALONE = 0.9  # each thread has a core for this share of the time if no other process needs it


PREPARED = "np"


class Shape(NamedTuple):
    """A class of products. Sizes are rounded to 1 or 1.5 times a power of two."""

    rows: int
    inner: int
    columns: int
    # "nt": the first operand row-major, the second column-major; "np": the second is prepared
    layout: str

    @property
    def work(self) -> int:
        return self.rows * self.inner * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.inner}x{self.columns} {self.layout}"


def shape_of(a: Matrix, b: Matrix) -> Shape | None:
    """Return the class of a product; None for a small one, or if operands have gaps."""
    layout = _layout_of(a) + _layout_of(b)
    sizes = *a[0], b[0][1]
    if len(layout) < 2:
        return None
    smallest = _SMALLEST_ROW if is_row(sizes[0], layout) else SMALLEST
    return class_of(sizes, layout) if sizes[0] * sizes[1] * sizes[2] >= smallest else None


def is_row(rows: int, layout: str) -> bool:
    """Return whether loops may compute it: one row, and contiguous columns."""
    return rows == 1 and layout[1] == "t"


def class_of(sizes: Iterable[int], layout: str = PREPARED) -> Shape:
    """Return the class of a product by rows, inner size and columns."""
    rows, inner, columns = (min(_rounded(size), _LONGEST) for size in sizes)
    while rows * inner * columns > _LARGEST:
        longest = max(rows, inner, columns)
        rows, inner, columns = (n // 2 if n == longest else n for n in (rows, inner, columns))
    return Shape(rows, inner, columns, layout)


def _layout_of(matrix: Matrix) -> str:
    (rows, columns), (down, right) = matrix
    if right == 1 and down >= columns:
        return "n"
    return "t" if down == 1 and right >= rows else ""


def _rounded(size: int) -> int:
    power = 1 << size.bit_length() - 1
    return min((power, power * 3 // 2, power * 2), key=lambda each: abs(each - size))


def by_rule(shape: Shape) -> str:
    """Return the library for a class that was not measured. The rule is never far from the measured
    choices.
    """
    if shape.layout == PREPARED:
        return ONEDNN
    if shape.layout[0] == "t" or shape.work >= _HUGE:
        return BLAS
    if shape.rows >= _MANY_ROWS and shape.work >= LARGE_PRODUCT:
        return ONEDNN
    few = shape.rows >= _FEWEST_ROWS and shape.inner * shape.columns >= LARGE_WEIGHT
    return ONEDNN if few else BLAS


def products(graph: Graph) -> Counter[tuple[tuple[int, ...], Shape]]:
    """Count a graph's large products, by exact sizes and class."""
    found = Counter[tuple[tuple[int, ...], Shape]]()
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return found
    parts = (part for part in graph.module.modules() if isinstance(part, fx.GraphModule))
    for node in (node for part in parts for node in part.graph.nodes):
        if node.target in (aten.mm.default, aten.addmm.default):
            a, b = (operand.meta["val"] for operand in node.args[-2:])
            shape = shape_of((a.shape, a.stride()), (b.shape, b.stride()))
            if shape is not None and a.dtype == torch.float32 and a.device.type == "cpu":
                found[(*map(int, a.shape), int(b.shape[1])), shape] += 1
    return found


def choices(graph: Graph, measures: bool = False) -> dict[Shape, str]:
    """Return the library of each class in a graph; with ``measures``, measure new classes."""
    work = Counter[Shape]()
    for (_, shape), times in products(graph).items():
        work[shape] += times * shape.work
    return chosen(work, measures)


def chosen(work: Counter[Shape], measures: bool) -> dict[Shape, str]:
    """Return the library of each class. The class with the most work is measured first."""
    if not work:
        return {}
    table = Table()
    missing = [shape for shape, _ in work.most_common() if shape not in table]
    if missing and measures:
        table.measure(missing)
    return {shape: table.get(shape) or by_rule(shape) for shape in sorted(work)}


def described_choices(graphs: Iterable[Graph]) -> tuple[str, ...]:
    """Return a line for each library with the large products that it computes."""
    by: dict[str, list[str]] = {}
    for graph in graphs:
        libraries = choices(graph)
        for ((rows, inner, columns), shape), times in products(graph).items():
            text = f"[{rows}, {inner}] x [{inner}, {columns}]"
            by.setdefault(libraries[shape], []).append(f"{times} of {text}" if times > 1 else text)
    return tuple(
        f"matrix products computed by {name}: {', '.join(each)}"
        for name, each in sorted(by.items())
    )


_known: dict[str, dict[str, str]] = {}  # what this process has read or measured, by conditions


class Table:
    """The libraries of classes, for this processor with this number of threads."""

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        self.conditions = f"{processor()}, {instructions()}, {threads}, {torch.__version__}"
        self._rows = _known.setdefault(self.conditions, {})

    def __contains__(self, shape: Shape) -> bool:
        return self.get(shape) is not None

    def get(self, shape: Shape) -> str | None:
        if str(shape) not in self._rows:
            for name, chosen in self._kept().get(self.conditions, {}).items():
                self._rows.setdefault(name, chosen)
        return self._rows.get(str(shape))

    def rows(self) -> list[Shape]:
        """Return the classes in the table."""
        names = (name.split() for name in self._kept().get(self.conditions, {}))
        return [Shape(*map(int, sizes.split("x")), layout) for sizes, layout in names]  # type: ignore[call-arg,arg-type]

    def measure(self, shapes: Iterable[Shape], remeasure: bool = False) -> dict[Shape, str]:
        """Choose libraries, and return what was measured. The first process chooses for all
        processes.

        Errors here do not affect a program.
        """
        descriptions: dict[Shape, str] = {}
        try:
            with FileLock(self._path().with_suffix(".lock"), timeout=_PATIENCE):
                missing = [shape for shape in shapes if remeasure or shape not in self]
                descriptions = self._choose(missing, float("inf") if remeasure else SECONDS)
                kept = self._kept()
                archive.write(
                    self._path(),
                    {"rows": json.dumps({**kept, self.conditions: self._rows}).encode()},
                )
        except Exception as error:
            log.engine.info(
                "The measured times of matrix products are not stored: %s", described(error)
            )
        return descriptions

    def _choose(self, shapes: Iterable[Shape], seconds: float) -> dict[Shape, str]:
        descriptions, end, met = {}, time.perf_counter() + seconds, dict[tuple[str, bool], str]()
        for shape in shapes:
            kind = shape.layout, is_row(shape.rows, shape.layout)
            if time.perf_counter() < end:
                times = times_of(shape)
                chosen, best = _usual(shape), min(times, key=times.__getitem__)
                if _is_better(best, times, shape) and _is_better(best, times_of(shape), shape):
                    chosen = best
                met[kind] = chosen
                other = LOOPS if LOOPS in times else ONEDNN
                descriptions[shape] = (
                    f"{other} takes {times[other] / times[BLAS]:.2f} of {BLAS}'s time"
                )
                log.engine.debug("Matrix products %s: %s", shape, descriptions[shape])
            else:  # as long as the last measurement of this kind
                chosen, descriptions[shape] = met.get(kind) or by_rule(shape), "not measured"
            self._rows[str(shape)] = chosen
        return descriptions

    @staticmethod
    def _path() -> Path:
        return of_the_user() / "products.table"

    def _kept(self) -> dict[str, dict[str, str]]:
        with contextlib.suppress(archive.InvalidFile, KeyError, OSError, ValueError):
            kept = archive.from_json(archive.read(self._path())["rows"])
            if isinstance(kept, dict) and all(isinstance(rows, dict) for rows in kept.values()):
                return kept
        return {}


def _is_better(library: str, times: Mapping[str, float], shape: Shape) -> bool:
    better = _BETTER_PREPARED if shape.layout == PREPARED and library == ONEDNN else _BETTER
    return times[library] < better * times[_usual(shape)]


def _usual(shape: Shape) -> str:
    """Return ATen; for few rows with a prepared weight, oneDNN, whose call includes what
    follows.
    """
    return ONEDNN if shape.layout == PREPARED and shape.rows < _MANY_ROWS else BLAS


def times_of(shape: Shape) -> dict[str, float]:
    """Return the seconds of each library: the minimum of alternating runs.

    A neighbour increases the times of several threads, mostly of those that wait at many barriers.
    In that case one thread, measured by the processor time it had, shows which kernel is better.
    """
    keep_freed_memory()  # as when compiled code runs
    runs, threads = alone(_runs, shape), torch.get_num_threads()
    usual = _usual(shape)
    with torch.no_grad():
        if threads > 1 and not is_crowded() and _cores(runs) >= _ALONE * threads:
            return _alternating_times(runs, usual, time.perf_counter)
        return alone(_alternating_times, runs, usual, time.thread_time)


def _runs(shape: Shape) -> Mapping[str, Trial]:
    rows, inner, columns, layout = shape
    full = functools.partial(torch.full, fill_value=0.5, dtype=torch.float32, device="cpu")
    a = full((rows, inner)) if layout[0] == "n" else full((inner, rows)).t()
    b = full((inner, columns)) if layout[1] == "n" else full((columns, inner)).t()
    weights = [b.clone() for _ in range(1 if rows >= _MANY_ROWS else 1 + _UNCACHED // b.nbytes)]
    result, linear = full((rows, columns)), private.linear_pointwise

    def over(run: Callable[[torch.Tensor], object], operands: list[torch.Tensor]) -> Trial:
        return lambda: [run(each) for each in operands]

    def blas(weight: torch.Tensor) -> object:
        return torch.mm(a, weight, out=result)

    def packed(weight: torch.Tensor) -> object:
        return linear(a, weight, None, "none", [-1], "")

    if layout == PREPARED:
        turned = [each.contiguous() for each in weights]
        onednn = [private.reorder_linear_weight(each.t(), rows) for each in weights]
        others = {TURNED: over(blas, turned), ONEDNN: over(packed, onednn)}
    elif is_row(rows, layout):
        sums = full((columns,))
        others = {LOOPS: over(lambda weight: torch.sum(weight.t(), 1, out=sums), weights)}
    else:
        others = {ONEDNN: over(packed, [each.t() for each in weights])}
    return {BLAS: over(blas, weights), **others}


def _cores(runs: Mapping[str, Trial]) -> float:
    """Return how many cores the slowest library uses; MKL uses one core for one row.

    Before that, let libraries prepare what they prepare once per shape.
    """
    cores = []
    for run in runs.values():
        alone(run)
        begin, used = time.perf_counter(), time.process_time()
        run()
        cores.append((time.process_time() - used) / (time.perf_counter() - begin))
    return max(cores)


def _alternating_times(
    runs: Mapping[str, Trial], usual: str, clock: Callable[[], float]
) -> dict[str, float]:
    _warm_up(runs)
    times = dict.fromkeys(runs, float("inf"))
    begin, (fewest, most) = time.perf_counter(), ROUNDS
    for done in range(most):
        spent = time.perf_counter() - begin
        if done >= fewest and spent > (_ENOUGH if _is_best(usual, times) else OF_ONE):
            break
        for name, run in runs.items():
            start = clock()
            run()
            times[name] = min(times[name], clock() - start)
    return times


def _is_best(usual: str, times: Mapping[str, float]) -> bool:
    return all(times[name] > _WORSE * times[usual] for name in times.keys() - {usual})


def _warm_up(runs: Mapping[str, Trial]) -> None:
    """Let each library compute ``WARM_UP`` products, if they are short."""
    begin, computed = time.perf_counter(), 0
    while computed < WARM_UP:
        for run in runs.values():
            if time.perf_counter() - begin > OF_ONE:
                return
            results = run()
        computed += len(results)


# Rows and weights of models that people train on processors.
_COMMON = [
    (rows, *weight)
    for weight in ((256, 256), (256, 1024), (1024, 256), (512, 512), (768, 768), (768, 3072))
    for rows in (8, 64, 1024)
]


def calibrate() -> dict[Shape, str]:
    """Measure common classes, and choose again for those in the table."""
    table = Table()
    common = (Shape(*sizes, layout) for sizes in _COMMON for layout in ("nn", "nt", "tn", PREPARED))
    shapes = {*table.rows(), *(shape for shape in common if shape.work >= SMALLEST)}
    descriptions = table.measure(sorted(shapes), remeasure=True)
    return {shape: f"{table.get(shape)}; {text}" for shape, text in descriptions.items()}
