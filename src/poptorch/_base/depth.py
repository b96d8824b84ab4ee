"""How deep containers may be nested: those of one that contains itself have no end."""

from __future__ import annotations

from .errors import Error

DEEPEST = 100


def too_deep(path: str, value: object) -> Error:
    """Return the error about a container that is too deep within others."""
    start = path if len(path) < 60 else f"{path[:60]}..."
    return Error(
        "Containers are nested too deeply, or contain themselves",
        got=f"{start}: more than {DEEPEST} levels, and then a {type(value).__name__}",
        fix="pass tensors in fewer levels of lists, tuples, dicts and dataclasses, without cycles",
    )
