"""Find backends by name, and choose the one for a program."""

from __future__ import annotations

import functools

from .._base import log
from .._ir import backend_names
from .._ir.backend_names import AUTO, OPTIMISE
from ..backends.protocol import Backend

BEST = "inductor"  # the backend for both names, which differ in when it compiles


@functools.cache
def available() -> dict[str, Backend]:
    from .._cpu import Inductor
    from ..backends.onnx_runtime import OnnxRuntime
    from ..backends.reference import Reference
    from ..backends.staged import StagedBackend

    own: tuple[Backend, ...] = (Reference(), Inductor(), StagedBackend(), OnnxRuntime())
    by_name = {backend.name: backend for backend in own}
    for point in backend_names.others():
        by_name[point.name] = point.load()()
    return by_name


def choose(name: str) -> Backend:
    """Return the backend with a name, or, with a warning, the reference backend if it
    cannot work.
    """
    chosen = BEST if backend_names.known(name) in (AUTO, OPTIMISE) else name
    backends = available()
    backend = backends[chosen]
    reason = backend.unavailable()
    if reason is None:
        return backend
    log.python.warning(
        "The %s backend cannot be used here (%s): running on the reference backend.", chosen, reason
    )
    return backends["reference"]


def checking(backend: Backend) -> Backend:
    from ..backends.reference import Checked

    if not works_by_stages(backend):
        return Checked()
    log.python.warning("The %s backend does not raise floating-point exceptions.", backend.name)
    return backend


def works_by_stages(backend: Backend) -> bool:
    return bool(getattr(backend, "by_stages", False))
