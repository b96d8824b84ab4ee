"""The one warning that every spelling of an earlier release gives."""

from __future__ import annotations

from .._base import log


def deprecated(old: str, new: str) -> None:
    """Log a WARNING that names what replaced an old spelling."""
    log.python.warning("%s is deprecated: use %s", old, new)


def deprecated_without_effect(old: str, reason: str) -> None:
    """Log a WARNING about an old setting that no longer does anything."""
    log.python.warning("[Deprecated] %s is deprecated and has no effect: %s", old, reason)
