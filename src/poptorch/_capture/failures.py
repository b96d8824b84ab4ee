"""Turn errors inside the user's ``forward`` into errors that explain the cause and the remedy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import TracebackType

from torch import nn

from .._base import env, private, source
from .._base.errors import Error, InvalidType, composed
from .value_reads import Uncapturable, dynamic_shape

FORWARD = "While poptorch captured forward of "  # begins the note on exceptions of the user's code

_ARRAY = "numpy.ndarray"
_TRY = (
    "call the module on one micro-batch without poptorch. If it works there, the function "
    "that this line calls cannot be captured"
)


@contextlib.contextmanager
def explained(module: nn.Module, inputs: str, backward: bool = False) -> Iterator[None]:
    """Add a note to exceptions of user code, and explain what cannot be captured."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        name, line = type(module).__name__, source.raising_line(error)
        if isinstance(error, private.optional("DynamicOutputShapeException") or ()):
            raise dynamic_shape(str(error), line) from error
        if isinstance(error, private.optional("DataDependentOutputException") or ()):
            raise Uncapturable(
                "A tensor's value is needed while the model is being captured",
                got=f"{error} in forward of {name}",
                where=line,
                fix=(
                    "compute without the value: use torch.where, masks, or results of a fixed size",
                    (
                        "or pass the value to forward as a Python number, which becomes a "
                        "compile-time constant"
                    ),
                ),
            ) from error
        if isinstance(error, TypeError) and _ARRAY in str(error):
            raise InvalidType(
                "A NumPy array was passed where a tensor is needed",
                got=f"{str(error).splitlines()[0]}, in forward of {name}",
                where=line,
                fix="pass torch.from_numpy(x) in place of the array x",
            ) from error
        note = f"{FORWARD}{name}"
        if not any(known.startswith(note) for known in getattr(error, "__notes__", ())):
            error.add_note(composed(note, inputs, line or source.calling_line(), _TRY))
        if backward and line is None:  # torch's own
            raise _as_error(error, name) from error
        raise


def _as_error(error: Exception, name: str) -> Error:
    cls: type[Error] = Error
    # classes with incompatible memory layouts cannot be combined
    with contextlib.suppress(TypeError):
        cls = type("Error", (Error, type(error)), {"__module__": "poptorch"})
    joined = cls.__new__(cls)
    title = f"the backward pass of {name} raised {type(error).__name__}"
    Error.__init__(joined, title, got=str(error) or "no message", fix=_TRY)
    return joined


def keep_user_frames(error: BaseException) -> None:
    """Remove our and torch's frames from our errors and from errors of the user's forward."""
    notes = getattr(error, "__notes__", ())
    explained = isinstance(error, Error) or any(note.startswith(FORWARD) for note in notes)
    if not explained or env.get("POPTORCH_FULL_TRACEBACK"):
        return
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
