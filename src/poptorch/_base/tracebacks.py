"""Tracebacks that end in the user's line, rather than in the frames of the tracer below it."""

from __future__ import annotations

from types import TracebackType

from . import env, source
from .errors import Error

FORWARD = "While poptorch captured forward of "  # starts the note on exceptions of the user's own


class UserFrames:
    """Within the block errors of ours, and of the user's forward, lose the frames between.

    Frames of the user's files and of packages other than torch stay. Other exceptions are our own
    mistakes and keep everything; ``POPTORCH_FULL_TRACEBACK=1`` keeps it for all.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: object
    ) -> None:
        if error is not None and _is_explained(error) and not env.get("POPTORCH_FULL_TRACEBACK"):
            _shorten(error)


def _is_explained(error: BaseException) -> bool:
    notes = getattr(error, "__notes__", ())
    return isinstance(error, Error) or any(note.startswith(FORWARD) for note in notes)


def _shorten(error: BaseException) -> None:
    seen: set[int] = set()
    linked: list[BaseException | None] = [error]
    while linked:
        one = linked.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = _users(one.__traceback__)
            linked += [one.__cause__, one.__context__]


def _users(traceback: TracebackType | None) -> TracebackType | None:
    if traceback is None:
        return None
    rest = _users(traceback.tb_next)
    frame = traceback.tb_frame
    if not source.is_model_file(frame.f_code.co_filename):
        return rest
    return TracebackType(rest, frame, traceback.tb_lasti, traceback.tb_lineno)
