"""Checks that several options make of their arguments."""

from __future__ import annotations

from typing import Any

from .._base.errors import AssertionFailure, InvalidValue
from ..enums import CommGroupType, ReductionType

UNLIMITED = 2**64 - 1
_DEVICE = "IPU"
_SYNTHETIC_OFF, _SYNTHETIC_NORMAL = 0, 2


def expect(name: str, value: Any, types: type | tuple[type, ...]) -> None:
    """Check the type of an argument.

    Raises:
        AssertionFailure: the value is not an instance of the type (an ``AssertionError``).
    """
    if not isinstance(value, types):
        wanted = types if isinstance(types, tuple) else (types,)
        raise AssertionFailure(
            f"Unexpected type for {name}",
            got=f"{value!r}, of type {type(value).__name__}",
            fix=f"pass {' or '.join(kind.__name__ for kind in wanted)}",
        )


def texts(values: Any, name: str = "excludes") -> list[str]:
    """Return a list of strings; anything else is an ``AssertionError``."""
    expect(name, values, (list, tuple))
    for part in values:
        expect(name, part, str)
    return list(values)


def buffer_names(values: Any) -> list[str]:
    """Return the names of buffers; anything else is an ``AssertionError``."""
    return texts(values, "buffers")


def check_seed(seed: Any) -> None:
    """Check the seed of a random generator.

    Raises:
        AssertionFailure: no int (an ``AssertionError``).
        InvalidValue: torch's generators have 64 bits (a ``ValueError``).
    """
    expect("random_seed", seed, int)
    if not -(1 << 63) <= seed < 1 << 64:
        raise InvalidValue(
            "The random seed is out of range",
            got=repr(seed),
            fix="use a number from 0 to 2**64 - 1",
        )


def limit(count: int | None) -> int | None:
    """Return the number that stands for no limit in the place of None."""
    return UNLIMITED if count is None else count


def check_period(period: object) -> None:
    """Check the period of ``EveryN``.

    Raises:
        AssertionFailure: not a positive int (an ``AssertionError``).
    """
    if not isinstance(period, int) or period < 1:
        raise AssertionFailure(
            "OutputMode.EveryN needs a positive output_return_period",
            got=repr(period),
            fix="for instance outputMode(OutputMode.EveryN, 2)",
        )


def mean_or_sum(kind: Any) -> ReductionType:
    """Return a reduction of gradients; anything else is a ``ValueError``."""
    accepted = (ReductionType.Mean, ReductionType.Sum)
    if not isinstance(kind, ReductionType) or kind not in accepted:
        raise InvalidValue(
            "The reduction type must be set to ReductionType.Mean or ReductionType.Sum",
            got=repr(kind),
        )
    return kind


def grouping_problem(replicas: int, size: int, kind: CommGroupType) -> str | None:
    """Return what is wrong with groups of replicas that share their input, or None."""
    if kind == CommGroupType.All:
        return "The input group type cannot be All"
    if replicas < size:
        return "The input group size cannot be larger than the replication factor"
    if size < 1 or replicas % size:
        return "The input group size must be a factor of the replication factor"
    return None


def memory_proportions(values: dict[str, float]) -> dict[int, float]:
    """Return the proportions by device index: ``{0: 0.5}`` for ``{"IPU0": 0.5}``."""
    return {_device_index(key): value for key, value in values.items()}


def is_on(enabled: Any) -> bool:
    """Return whether a flag, or the 0 or 1 of older scripts, is set; texts are refused."""
    expect("enabled", enabled, (bool, int))
    return bool(enabled)


def synthetic_mode(enabled: Any) -> int:
    """Return the backend's number for synthetic data, or for none."""
    return _SYNTHETIC_NORMAL if is_on(enabled) else _SYNTHETIC_OFF


def _device_index(key: str) -> int:
    if not isinstance(key, str) or not key.startswith(_DEVICE):
        raise AssertionFailure(
            "Keys of the available memory proportion must start with IPU",
            got=repr(key),
            fix='for instance setAvailableMemoryProportion({"IPU0": 0.5})',
        )
    try:
        return int(key.removeprefix(_DEVICE))
    except ValueError:
        raise InvalidValue("The device index after IPU must be an integer", got=repr(key)) from None
