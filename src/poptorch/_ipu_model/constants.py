"""The constants of the cost model: each with its value, its unit and where it comes from.

The facts about chips themselves (tiles, clock, memory) are rows of ``_systems.KINDS``. A *fitted*
constant, four at most, is what ``benchmarks/ipu_rows.py --fit`` prints, after published results. A
*guess* has no source that could be found; estimates say how much of a result it decides.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, fields
from typing import Any


class Mark(enum.StrEnum):
    READ = "read in a public source"
    DERIVED = "derived by arithmetic from public figures"
    FITTED = "fitted to published results by benchmarks/ipu_rows.py"
    GUESS = "guess"


def _constant(value: float, unit: str, mark: Mark, source: str) -> Any:
    return field(default=value, metadata={"unit": unit, "mark": mark, "source": source})


_POPLIBS = "PopLibs (MIT), popopsCycleEstimators and poplin PerformanceEstimation"
_POPLAR = "poplar::Target as quoted by an open IPU21 model"


@dataclass(frozen=True)
class Constants:
    """What prices are made of. Cycles are a tile's; bytes per second are for one chip."""

    # Inside a chip.
    workers: float = _constant(
        6, "slots", Mark.READ, "six worker threads take turns; arXiv 1912.03413"
    )
    exchange_bytes: float = _constant(4, "bytes/cycle", Mark.READ, f"received per tile; {_POPLAR}")
    copy_bytes: float = _constant(
        6, "bytes/cycle", Mark.READ, f"a tile's memcpy, measured; {_POPLAR}"
    )
    weight_load_bytes: float = _constant(
        16, "bytes/cycle", Mark.READ, f"into a matrix unit from interleaved memory; {_POPLAR}"
    )
    product_call: float = _constant(50, "cycles", Mark.READ, f"supervisor, per product; {_POPLIBS}")
    product_block: float = _constant(
        34 + 12, "cycles", Mark.READ, f"per block of weights: start of workers, group; {_POPLIBS}"
    )
    loop_call: float = _constant(
        6 * 17 + 20, "cycles", Mark.READ, f"per operator on a region; {_POPLIBS}, UnaryOp1D"
    )
    vector_products: float = _constant(
        8, "half MACs/cycle", Mark.GUESS, "products too narrow for the matrix unit; fp32 a quarter"
    )
    exchange_efficiency: float = _constant(0.99, "share", Mark.FITTED, "of the exchange's peak")
    step: float = _constant(
        2850, "cycles", Mark.FITTED, "per superstep: sync, control code, uneven tiles"
    )
    # Between chips.
    external_sync: float = _constant(
        600, "cycles", Mark.READ, f"per exchange between chips; {_POPLAR}"
    )
    link_bytes: float = _constant(
        64e9, "bytes/s", Mark.READ, "one IPU-Link to a neighbour; Bow-2000 datasheet"
    )
    link_efficiency: float = _constant(
        0.85, "share", Mark.READ, "of links; PopLibs, lib/poplibs_test/Util.cpp"
    )
    gateway_bytes: float = _constant(
        2 * 12.5e9 / 4, "bytes/s", Mark.DERIVED, "2 x 100 Gbit/s a machine, shared by 4 chips"
    )
    collective_step: float = _constant(
        10e-6, "s", Mark.GUESS, "latency of one step of a ring between chips"
    )
    # Outside.
    host_bytes: float = _constant(
        5.5e9, "bytes/s", Mark.READ, "through the gateway; Graphcore examples, EfficientDet"
    )
    network_bytes: float = _constant(
        12.5e9, "bytes/s", Mark.READ, "100 GbE between a machine of 4 chips and its host"
    )
    streaming_bytes: float = _constant(
        20e9, "bytes/s", Mark.GUESS, "streaming memory of one chip; no published figure"
    )
    call_seconds: float = _constant(
        0.68e-3, "s", Mark.FITTED, "starting the device's program and waiting for it, per call"
    )
    python_seconds: float = _constant(
        1.88e-3, "s", Mark.FITTED, "PopTorch's own work on the host, per call"
    )
    # Memory.
    code_base: float = _constant(
        28 << 10, "bytes/tile", Mark.GUESS, "control code, library codelets, stacks"
    )
    code_step: float = _constant(
        160, "bytes/tile", Mark.GUESS, "exchange and vertex code per different superstep"
    )
    gaps: float = _constant(
        0.02, "share", Mark.GUESS, "of a tile: padding, and activations that lie unevenly"
    )
    memory_proportion: float = _constant(
        0.6, "share", Mark.READ, "of a tile that one product may use; PopTorch user guide"
    )

    @property
    def inside(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in _INSIDE)

    def marked(self, mark: Mark) -> list[str]:
        return [each.name for each in fields(self) if each.metadata["mark"] is mark]


_NAMES = [each.name for each in fields(Constants)]
_INSIDE = tuple(_NAMES[: _NAMES.index("external_sync")])
DEFAULT = Constants()
