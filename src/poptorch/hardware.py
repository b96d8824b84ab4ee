"""Questions about the system's devices (PopTorch user guide, "Environment variables")."""

from __future__ import annotations

from ._base.errors import AssertionFailure
from ._machine import systems
from .options.device_choice import model_from_environment


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Tell whether the system has a device with that many chips, busy or not.

    False where the environment selects the simulated device, and for sizes that no device has.
    The system is a virtual one that ``POPTORCH_POD`` describes.
    """
    _, is_simulated = model_from_environment()
    if is_simulated:
        return False
    return any(len(chips) == num_ipus for chips in systems.current().devices)


def ipuHardwareVersion() -> int:
    """Return the generation of the system's chips: 1, 2 or 21.

    Raises:
        AssertionError: there are none.
    """
    if not ipuHardwareIsAvailable():
        raise AssertionFailure(
            "No IPU hardware available",
            fix="ask poptorch.ipuHardwareIsAvailable() first",
        )
    return systems.current().kind.generation
