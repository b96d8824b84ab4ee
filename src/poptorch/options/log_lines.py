"""The DEBUG lines in which users look for their settings (PopTorch user guide, "Options")."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._base import env, log
from ..enums import OutputMode
from .device_choice import choose_device
from .freeze import cache_directory
from .options import Options
from .show import show

_ANCHOR_MODES = {
    OutputMode.Final: "FINAL/1",
    OutputMode.All: "ALL/1",
    OutputMode.Sum: "Sum/1",
}


def log_options(options: Options) -> None:
    """Log every setting at DEBUG, and at INFO what the environment decided; once per compile.

    Args:
        options: the executor's own, whose output mode is resolved.
    """
    choice = choose_device(options)
    if choice.reason:
        log.python.info(choice.reason)
    if choice.device == "model" and cache_directory(options) is not None:
        log.python.warning("Executable caching doesn't work with the IPU model: it is switched off")
    if options._values["backend"] == "auto" and env.get("POPTORCH_BACKEND"):
        log.python.info(
            "From POPTORCH_BACKEND environment variable: %s", env.get("POPTORCH_BACKEND")
        )
    values = options.toDict()
    values.pop("compilation_progress_bar_fn", None)
    for name, value in values.items():
        for line in _lines(name, value):
            log.engine.debug("poptorch.Options %s", line)


def _lines(name: str, value: Any) -> Iterator[str]:
    if name == "anchored_tensors":
        for short, (long, _, mode, period) in value.items():
            yield f"set {name}[{short}] to {long} {_ANCHOR_MODES.get(mode, f'EVERYN/{period}')}"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield f"set {name}[{key}] to {_text(item)}"
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in sorted(value, key=show) if isinstance(value, (set, frozenset)) else value:
            yield f"added {_text(item)} to {name}"
    else:
        yield f"set {name} to value {_text(value)}"


def _text(value: Any) -> str:
    """Booleans in lower case, numbers and enums as numbers, strings without quotes."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(int(value))
    return value if isinstance(value, str) else show(value)
