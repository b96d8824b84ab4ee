"""Define the constants of the cost model: each with its value, its unit and its source.

``benchmarks/ipu_rows.py --fit`` prints the *fitted* constants, at most four. A
*guess* has no source that could be found. Estimates say how much of a result depends on guesses.
"""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass, field, fields
from typing import Any


class Mark(enum.StrEnum):
    READ = "read in a public source"
    DERIVED = "derived by arithmetic from public figures"
    FITTED = "fitted to published results by benchmarks/ipu_rows.py"
    GUESS = "guess"


def _constant(mark: Mark, value: float, unit: str, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "mark": mark, "source": source})


_read = functools.partial(_constant, Mark.READ)
_derived = functools.partial(_constant, Mark.DERIVED)
_fitted = functools.partial(_constant, Mark.FITTED)
_guess = functools.partial(_constant, Mark.GUESS)


_POPLIBS = "PopLibs (MIT), popopsCycleEstimators and poplin PerformanceEstimation"
_POPLAR = "poplar::Target as quoted by an open IPU21 model"


@dataclass(frozen=True)
class Constants:
    """The constants that estimates are made of. Cycles are those of a tile; bytes per second are
    per chip.
    """

    # Inside a chip.
    workers: float = _read(6, "slots", "six worker threads take turns; arXiv 1912.03413")
    exchange_bytes: float = _read(4, "bytes/cycle", f"received per tile; {_POPLAR}")
    copy_bytes: float = _read(6, "bytes/cycle", f"a tile's memcpy, measured; {_POPLAR}")
    weight_load_bytes: float = _read(
        16, "bytes/cycle", f"into a matrix unit from interleaved memory; {_POPLAR}"
    )
    product_call: float = _read(50, "cycles", f"supervisor, per product; {_POPLIBS}")
    product_block: float = _read(
        34 + 12, "cycles", f"per block of weights: start of workers, group; {_POPLIBS}"
    )
    loop_call: float = _read(
        6 * 17 + 20, "cycles", f"per operator on a region; {_POPLIBS}, UnaryOp1D"
    )
    vector_products: float = _guess(
        8, "half MACs/cycle", "products too narrow for the matrix unit; fp32 a quarter"
    )
    exchange_efficiency: float = _fitted(0.99, "share", "of the exchange's peak")
    step: float = _fitted(2710, "cycles", "per superstep: sync, control code, uneven tiles")
    # Between chips.
    external_sync: float = _read(600, "cycles", f"per exchange between chips; {_POPLAR}")
    link_bytes: float = _read(64e9, "bytes/s", "one IPU-Link to a neighbour; Bow-2000 datasheet")
    link_efficiency: float = _read(0.85, "share", "of links; PopLibs, lib/poplibs_test/Util.cpp")
    gateway_bytes: float = _derived(
        2 * 12.5e9 / 4, "bytes/s", "2 x 100 Gbit/s a machine, shared by 4 chips"
    )
    collective_step: float = _guess(10e-6, "s", "latency of one step of a ring between chips")
    # Outside of chips.
    host_bytes: float = _derived(
        8.8e6 / 3.1e-3, "bytes/s", "through the gateway; Graphcore examples, EfficientDet"
    )
    network_bytes: float = _read(
        12.5e9, "bytes/s", "100 GbE between a machine of 4 chips and its host"
    )
    streaming_bytes: float = _guess(
        20e9, "bytes/s", "streaming memory of one chip; no published figure"
    )
    call_seconds: float = _fitted(
        0.61e-3, "s", "starting the device's program and waiting for it, per call"
    )
    python_seconds: float = _fitted(1.95e-3, "s", "PopTorch's own work on the host, per call")
    # Memory.
    code_base: float = _guess(28 << 10, "bytes/tile", "control code, library codelets, stacks")
    code_step: float = _guess(160, "bytes/tile", "exchange and vertex code per different superstep")
    gaps: float = _guess(0.02, "share", "of a tile: padding, and unevenly distributed activations")
    memory_proportion: float = _read(
        0.6, "share", "of a tile that one product may use; PopTorch user guide"
    )

    @property
    def inside(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in _INSIDE)


_NAMES = [each.name for each in fields(Constants)]
_INSIDE = tuple(_NAMES[: _NAMES.index("external_sync")])
DEFAULT = Constants()
ERROR_BANDS = {"transformer": 1.15, "convolution": 1.65, "host-bound": 1.95}
"""For each kind of program, the factor that ``benchmarks/ipu_rows.py --bands`` prints,
rounded up.
"""
