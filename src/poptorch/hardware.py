"""Ask which devices the system has (PopTorch user guide, "Environment variables")."""

from __future__ import annotations

from . import _ipu_systems
from ._base.errors import AssertionFailure, InvalidType
from .options.freeze_options import model_from_environment


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Return whether the system has a device with this number of chips, in use or free.

    ``POPTORCH_POD`` describes the system. With the simulated device the answer is False.

    Raises:
        TypeError: ``num_ipus`` is not an integer.
    """
    if not isinstance(num_ipus, int) or isinstance(num_ipus, bool):
        raise InvalidType(
            "The argument of ipuHardwareIsAvailable must be a number of IPUs",
            got=repr(num_ipus),
            fix="pass an int, such as poptorch.ipuHardwareIsAvailable(4)",
        )
    _, is_simulated = model_from_environment()
    if is_simulated:
        return False
    return any(len(chips) == num_ipus for chips in _ipu_systems.current().devices)


def ipuHardwareVersion() -> int:
    """Return the generation of the system's chips: 1, 2 or 21.

    Raises:
        AssertionError: the system has no chips.
    """
    if not ipuHardwareIsAvailable():
        raise AssertionFailure(
            "No IPU hardware available",
            fix=("call poptorch.ipuHardwareIsAvailable() to check first"),
        )
    return _ipu_systems.current().kind.generation
