"""A wrapped model as it is priced: captured for arguments whose values mean nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .. import _compile
from .._base import source
from .._ir.spec import Spec
from .session import Session


def capture_for_estimate(
    session: Session, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[_compile.Capture, Spec]:
    """Capture a wrapped model for arguments of this kind, without compiling it.

    Args:
        session: of the wrapped model, whose weights may be on the meta device.
        args, kwargs: as for ``forward``; they may be, too.

    Returns:
        What was captured, and the settings.
    """
    bound = session.model.signature.bind(args, kwargs)
    session.sync.fetch()
    spec = session._settings()
    task = session.model.task(bound, spec, session.optimizer, made_up=True)
    rows = max((t.shape[0] for t in bound.tensors if t.dim()), default=1)
    with source.excluding(spec.runtime.source_excludes):
        return _compile.capture_for_estimate(task.request, spec, task.optim, rows), spec
