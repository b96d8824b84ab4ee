"""Which backends there are, and which one a program gets."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from .._base import log
from .._base.errors import Error
from .protocol import Backend

GROUP = "poptorch.backends"
AUTO, OPTIMISE = "auto", "optimise"
BEST = "inductor"  # what both mean; they differ in when it compiles


@functools.cache
def available() -> dict[str, Backend]:
    from .inductor import Inductor
    from .reference import Reference
    from .staged import ByStages

    own: tuple[Backend, ...] = (Reference(), Inductor(), ByStages())
    by_name = {backend.name: backend for backend in own}
    for point in entry_points(group=GROUP):
        by_name[point.name] = point.load()()
    return by_name


def choose(name: str) -> Backend:
    """Return the backend of a name, or with a warning the reference one if it cannot work."""
    backends = available()
    wanted = BEST if name in (AUTO, OPTIMISE) else name
    if wanted not in backends:
        raise Error(
            "Unknown backend",
            got=repr(name),
            fix=f"use one of {', '.join(sorted([AUTO, OPTIMISE, *backends]))}",
        )
    backend = backends[wanted]
    reason = backend.unavailable()
    if reason is None:
        return backend
    log.python.warning(
        "The %s backend cannot work here (%s): running on the reference backend.", wanted, reason
    )
    return backends["reference"]


def checking(backend: Backend) -> Backend:
    from .reference import Checked

    if not works_by_stages(backend):
        return Checked()
    log.python.warning("The %s backend raises no floating-point exceptions.", backend.name)
    return backend


def works_by_stages(backend: Backend) -> bool:
    return bool(getattr(backend, "by_stages", False))
