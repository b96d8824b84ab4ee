"""Define the names of backends for users. Other packages register theirs as an entry point."""

from __future__ import annotations

from importlib.metadata import EntryPoints, entry_points

from .._base.errors import Error

AUTO, OPTIMISE = "auto", "optimise"
_OWN = (AUTO, "inductor", "onnxruntime", OPTIMISE, "reference", "staged")


def others() -> EntryPoints:
    return entry_points(group="poptorch.backends")


def known(name: str) -> str:
    if name in _OWN:
        return name
    names = sorted({*_OWN, *others().names})
    if name not in names:
        raise Error("Unknown backend", got=repr(name), fix=f"use one of {', '.join(names)}")
    return name
