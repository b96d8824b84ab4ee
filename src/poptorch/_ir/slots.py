"""Define slots, which describe the tensors that enter or leave a graph, and the types to which
64-bit types are narrowed. Slots are made only here.
"""

from __future__ import annotations

import enum
import functools
import math
from dataclasses import dataclass, replace

import torch


class Kind(enum.StrEnum):
    """The kinds of slots, in the order in which programs print them."""

    PARAM = "param"
    BUFFER = "buffer"
    CONSTANT = "constant"
    BATCH = "batch"
    GRADIENT = "gradient"
    LOSS = "loss"
    OUTPUT = "output"
    ANCHOR = "anchor"
    COUNTER = "counter"
    ACCUM = "accum"
    OPTSTATE = "optstate"
    HYPER = "hyper"
    RNG = "rng"
    VALUE = "value"


STATE_KINDS = frozenset(
    {Kind.PARAM, Kind.BUFFER, Kind.ACCUM, Kind.OPTSTATE, Kind.HYPER, Kind.RNG, Kind.CONSTANT}
)
MODEL_STATE = (Kind.PARAM, Kind.BUFFER, Kind.CONSTANT)  # what a model has without an optimizer
EVOLVING = (Kind.BUFFER, Kind.CONSTANT)  # kinds that forward changes, separately in each replica
RETURNED = (Kind.LOSS, Kind.OUTPUT)  # what forward returns
HALF_TYPES = frozenset({torch.float16, torch.bfloat16})
# In torch, and therefore here, sums of these types are wider.
SMALL_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16})
DECAY_RATES = frozenset({"alpha", "beta1", "beta2"})
ACCUMULATED = "AccumulatedGradient___"  # anchors the gradient with which an update changes a weight
NORM = "GradientNorm"  # anchors the norm of all gradients before clipping


@dataclass(frozen=True)
class Slot:
    kind: Kind
    # the shape in one run; for batches and results, the shape of one micro-batch, after lanes
    shape: tuple[int, ...]
    dtype: torch.dtype  # inside the program
    name: str = ""  # for example ``velocity`` for a moment or ``lr`` for a hyper-parameter
    weight: str = ""  # path of the parameter that it is, or whose gradient or moment it is
    index: int = -1  # index of an input, output, constant or group; -1 if there is only one
    replicas: int = 1  # number of values on the device, one for each replica; 1 if all share one
    lanes: bool = False  # whether dimension 0 contains lanes, or, for state, the replicas
    # A name or expression for each dimension with a symbolic size, and "" for the others; () if all
    # sizes are numbers. The shape is then the one for example sizes: see ``symbolic``.
    symbols: tuple[str, ...] = ()

    @functools.cached_property
    def path(self) -> str:
        """A name that is unique within the kind: ``velocity.fc1.weight``, ``fc1.weight``,
        ``0.lr``.
        """
        return self._path_of(self.weight)

    @functools.cached_property  # estimates read it thousands of times
    def key(self) -> str:
        return f"{self.kind}.{self.path}"

    def key_of(self, weight: str) -> str:
        """Return the key of the same tensor of another weight."""
        return f"{self.kind}.{self._path_of(weight)}" if self.weight else self.key

    def _path_of(self, weight: str) -> str:
        index = str(self.index) if self.index >= 0 else ""
        return ".".join(filter(None, (index, self.name, weight)))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def is_state(self) -> bool:
        return self.kind in STATE_KINDS

    @property
    def replica_shape(self) -> tuple[int, ...]:
        return self.shape[1:] if self.lanes else self.shape

    @property
    def device_shape(self) -> tuple[int, ...]:
        return (self.replicas, *self.replica_shape) if self.replicas > 1 else self.shape

    def of(self, weight: Slot) -> Slot:
        """Return the same tensor for another weight, for example its gradient or the same
        moment.
        """
        return replace(self, weight=weight.weight, shape=weight.shape)

    @property
    def type_text(self) -> str:
        symbols = self.symbols or ("",) * len(self.shape)
        sizes = (name or size for name, size in zip(symbols, self.shape, strict=True))
        return type_text(self.dtype, tuple(sizes))

    def __str__(self) -> str:
        return f"{self.key}: {self.type_text}"


def type_text(dtype: torch.dtype, shape: tuple[int | str, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(map(str, shape))}]"


def narrowed(dtype: torch.dtype) -> torch.dtype:
    return {torch.float64: torch.float32, torch.int64: torch.int32}.get(dtype, dtype)


def unchanged(dtype: torch.dtype) -> torch.dtype:
    return dtype


def param(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(Kind.PARAM, shape, dtype, weight=path)


def buffer(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(Kind.BUFFER, shape, dtype, path)


def gradient(weight: Slot, dtype: torch.dtype | None = None) -> Slot:
    return Slot(Kind.GRADIENT, weight.shape, dtype or weight.dtype, weight=weight.weight)


def accumulator(weight: Slot, dtype: torch.dtype) -> Slot:
    return Slot(Kind.ACCUM, weight.shape, dtype, weight=weight.weight)


def exchanged(index: int, size: int, dtype: torch.dtype) -> Slot:
    return Slot(Kind.ACCUM, (size,), dtype, "~bucket", index=index)


def squares(count: int, dtype: torch.dtype) -> Slot:
    return Slot(Kind.ACCUM, (count,), dtype, "~squares")


def moment(name: str, weight: Slot, dtype: torch.dtype) -> Slot:
    return Slot(Kind.OPTSTATE, weight.shape, dtype, name, weight.weight)


def hyper(name: str, group: int = -1, dtype: torch.dtype = torch.float32) -> Slot:
    """Return the slot of a hyper-parameter. Decay rates near 1 are passed as their complement,
    which float32 represents precisely.
    """
    name = f"one_minus_{name}" if name in DECAY_RATES else name
    return Slot(Kind.HYPER, (), dtype, name, index=group)


def traced_hyper(name: str, group: int, dtype: torch.dtype) -> Slot:
    """Return the slot of a hyper-parameter that an optimizer's own ``step`` reads."""
    return Slot(Kind.HYPER, (), dtype, name, index=group)


def kept_number(name: str, group: int, dtype: torch.dtype) -> Slot:
    """Return the slot of a number that all weights of a group share, for example a step count."""
    return Slot(Kind.OPTSTATE, (), dtype, name, index=group)


def hyper_value(name: str, value: float) -> float:
    """Convert the value of a hyper-parameter to the value in its slot, or the reverse."""
    return 1 - value if name in DECAY_RATES else value


def batch_input(
    index: int, shape: tuple[int, ...], dtype: torch.dtype, symbols: tuple[str, ...] = ()
) -> Slot:
    return Slot(Kind.BATCH, shape, dtype, index=index, symbols=symbols)


def result(index: int, tensor: torch.Tensor, is_loss: bool = False, lanes: bool = False) -> Slot:
    kind = Kind.LOSS if is_loss else Kind.OUTPUT
    return Slot(kind, tuple(tensor.shape), tensor.dtype, index=index, lanes=lanes)


def constant(index: int, tensor: torch.Tensor) -> Slot:
    return Slot(Kind.CONSTANT, tuple(tensor.shape), tensor.dtype, index=index)


def anchor(name: str, shape: tuple[int, ...], dtype: torch.dtype, lanes: bool = False) -> Slot:
    return Slot(Kind.ANCHOR, shape, dtype, name, lanes=lanes)


def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
    return Slot(Kind.VALUE, shape, dtype, name)


STEP = Slot(Kind.OPTSTATE, (), torch.float32, "step")
STEPPED = Slot(Kind.OPTSTATE, (), torch.float32, "stepped")  # 1 after the first optimizer step
LOSS_SCALE_FACTOR = Slot(Kind.OPTSTATE, (), torch.float32, "loss_scale_factor")
# number of elements near overflow
BEYOND_EDGE = Slot(Kind.ACCUM, (), torch.float32, "~beyond_edge")
# starts at the seed and increases by one per update
ROUNDING = Slot(Kind.RNG, (), torch.int64, "rounding")
# index of the micro-batch, or of the chunk of lanes, in this update
MICRO = Slot(Kind.COUNTER, (), torch.float32, "micro")
REPLICA = Slot(Kind.COUNTER, (), torch.float32, "replica")
LOSS_SCALING = hyper("loss_scaling")
