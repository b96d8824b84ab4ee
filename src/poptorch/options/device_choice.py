"""Which kind of device runs a model: the options, then the environment."""

from __future__ import annotations

from typing import NamedTuple

from .._base import env
from .._base.errors import Error
from ..enums import ConnectionType
from .options import Options

GENERATIONS = (1, 2, 21)
MODEL_VERSIONS = {"ipu1": 1, "ipu2": 2, "ipu21": 21}
SMALL_MODEL_TILES = 4


class DeviceChoice(NamedTuple):
    """The kind of device and, if something other than the default decided it, what did.

    Attributes:
        device: ``"ipu"``, ``"model"`` or ``"offline"``.
        generation: 1, 2 or 21; None for whatever the system has.
        tiles: per chip, when not the generation's own count.
        reason: for the log: ``From ...: Ipu model: Enabled``; None for the default.
    """

    device: str
    generation: int | None = None
    tiles: int | None = None
    reason: str | None = None


def choose_device(options: Options) -> DeviceChoice:
    """Return the device for some options and the present environment.

    Raises:
        Error: an offline target together with the simulated device or a device id, an unknown
            generation, or an invalid POPTORCH_IPU_MODEL_VERSION.
    """
    model = _choose_model(options)
    if options.connection_type != ConnectionType.Never:
        return model
    if model.device == "model":
        raise Error(
            "Offline compilation is not supported for the IPU model",
            got=model.reason,
            fix="drop useOfflineIpuTarget / ConnectionType.Never, or call useIpuModel(False)",
        )
    if options.exists("ipu_id"):
        raise Error(
            "An offline target cannot be combined with useIpuId",
            got=f"useIpuId({options.ipu_id})",
            fix="drop one of the two",
        )
    generation = options.ipu_version if options.exists("ipu_version") else None
    if generation is not None and generation not in GENERATIONS:
        raise Error(
            "Invalid offline IPU version",
            got=repr(generation),
            fix="pass 1, 2 or 21 to useOfflineIpuTarget",
        )
    return DeviceChoice("offline", generation)


def _choose_model(options: Options) -> DeviceChoice:
    small = False
    if options.exists("use_model"):
        enabled = options.use_model
        reason = f"the user configuration: Ipu model: {'Enabled' if enabled else 'Disabled'}"
    else:
        variable, enabled = model_from_environment()
        small = enabled and variable == "POPTORCH_SMALL_IPU_MODEL"
        state = "Enabled" if enabled else "Disabled"
        reason = f"{variable} environment variable: Ipu model: {state}" if variable else ""
    text = f"From {reason}" if reason else None
    if not enabled:
        return DeviceChoice("ipu", reason=text)
    return DeviceChoice("model", _model_generation(), SMALL_MODEL_TILES if small else None, text)


def model_from_environment() -> tuple[str | None, bool]:
    """Return the variable that decides about the simulated device, if any, and what it says."""
    full, small = env.get("POPTORCH_IPU_MODEL"), env.get("POPTORCH_SMALL_IPU_MODEL")
    if full or (full is not None and not small):
        return "POPTORCH_IPU_MODEL", full
    if small is not None:
        return "POPTORCH_SMALL_IPU_MODEL", small
    return None, False


def _model_generation() -> int:
    version = env.get("POPTORCH_IPU_MODEL_VERSION")
    if version not in MODEL_VERSIONS:
        raise Error(
            "Invalid IPU model version",
            got=f"POPTORCH_IPU_MODEL_VERSION={version}",
            fix=f"use one of {', '.join(MODEL_VERSIONS)}",
        )
    return MODEL_VERSIONS[version]
