"""Calls with odd arguments, first calls too: refused in words, or right; nothing has changed."""

import random
from typing import Any

import poptorch
from poptorch._capture.failures import FORWARD
from poptorch.backends import rollback

from .models import KINDS, Subject, close, same
from .odd import SAME, odd

CALLS = 12  # of one model


def documented(error: BaseException) -> bool:
    """Tell whether an exception is ours, or one of forward or an operator with our note."""
    notes = getattr(error, "__notes__", ())
    ours = (FORWARD, rollback.note(0, 0))
    return isinstance(error, poptorch.Error) or any(note.startswith(ours) for note in notes)


def trial(number: int):
    draw = random.Random(number)
    name = draw.choice(sorted(KINDS))
    subject = Subject(draw, name)
    usual = draw.random() < 0.5  # begins as it is meant to be used
    for call in range(CALLS):
        args, kwargs, what = subject.kind.batch(), dict[str, Any](), "as meant"
        if call != CALLS - 1 and (call or not usual) and draw.random() < 0.8:
            try:
                what, args, kwargs = odd(draw, args)
            except Exception:  # there is no such tensor
                continue
        outcome, problem = attempt(subject, what, args, kwargs)
        yield outcome, problem and f"{name}, {what}: {problem}"
        if problem or subject.large():
            break
    subject.wrapper.destroy()


def attempt(subject, what, args, kwargs) -> tuple[str, str | None]:
    before = subject.state()
    try:
        got = subject.wrapper(*args, **kwargs)
    except Exception as error:
        if not documented(error):
            return "exception", f"{type(error).__name__}: {str(error)[:200]}"
        if not same(subject.state(), before):
            return "refused", f"something has changed after {type(error).__name__}"
        if what != "as meant":
            return "refused", None
        if not subject.wrapper.isCompiled():
            return "refused", f"the right call is refused: {error}"
        subject.wrapper.destroy()  # it was compiled for an odd kind
        again, problem = attempt(subject, what, args, kwargs)
        return again, problem and f"after destroy(): {problem}"
    if what != "as meant" and what not in SAME:
        subject.follow()
        return "taken", None
    try:
        expected = subject.native(args, kwargs)
    except Exception:
        subject.follow()
        return "taken", None
    if what in ("NaN", "infinite"):  # weights are no numbers from now on
        return "right", None if close(got, expected) else "other numbers than eager"
    right = close(got, expected) and all(
        map(close, subject.model.state_dict().values(), subject.eager.state_dict().values())
    )
    return "right", None if right else "other numbers than eager"
