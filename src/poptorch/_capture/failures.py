"""Turning what goes wrong inside the user's ``forward`` into errors that teach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from torch import nn

from .._base import env, source
from .._base.errors import Error
from .trace import has_dynamic_shape, needs_value
from .value_reads import Uncapturable, dynamic_shape

FORWARD = "While poptorch captured forward of "  # starts the note on exceptions of the user's own

_TRY = "Call the module on one micro-batch without poptorch to see the same failure"


@contextlib.contextmanager
def explained(module: nn.Module) -> Iterator[None]:
    """Let what ``forward`` raises pass, with a note; say in our words what cannot be captured."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        if has_dynamic_shape(error):
            raise dynamic_shape(str(error), source.raising_line(error)) from error
        if needs_value(error):
            raise _value_needed(error, module) from error
        _note(error, module)
        raise


@contextlib.contextmanager
def explained_backward(module: nn.Module) -> Iterator[None]:
    """As ``explained``, for the backward pass: what torch raises by itself becomes our Error."""
    try:
        with explained(module):
            yield
    except Error:
        raise
    except Exception as error:
        if source.raising_line(error) is not None:  # a backward of the user's own
            raise
        raise _as_error(error, module) from error


def _note(error: Exception, module: nn.Module) -> None:
    note = f"{FORWARD}{type(module).__name__}"
    line = source.raising_line(error)
    lines = [f"{note}: {line}" if line else note, _TRY]
    if not any(known.startswith(note) for known in getattr(error, "__notes__", ())):
        error.add_note("\n  ".join(lines))


def _value_needed(error: Exception, module: nn.Module) -> Error:
    return Uncapturable(
        "A tensor's value is needed while the model is being captured",
        got=f"{error} in forward of {type(module).__name__}",
        where=source.raising_line(error),
        fix=(
            "keep the decision in tensors: torch.where, masks, fixed-size results",
            "pass the value to forward as a Python number: a compile-time constant",
        ),
    )


def _as_error(error: Exception, module: nn.Module) -> Error:
    cls: type[Error] = Error
    with contextlib.suppress(TypeError):  # classes of incompatible layout cannot be joined
        cls = type("Error", (Error, type(error)), {"__module__": "poptorch"})
    joined = cls.__new__(cls)
    Error.__init__(
        joined,
        f"the backward pass of {type(module).__name__} raised {type(error).__name__}",
        got=str(error) or "no message",
        where=source.raising_line(error),
        fix=_TRY[0].lower() + _TRY[1:],
    )
    return joined


class UserFrames:
    """Errors of ours, and those of the user's forward, lose our and torch's frames."""

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
