"""What a checkpoint keeps of schedulers and other objects with a ``state_dict()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import _session
from ._base import trees
from ._base.errors import Error


def check_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Let no state replace what an object does: schedulers take any name as an attribute's."""
    for name, each in stateful.items():
        wrong = (
            states[name].keys() - each.state_dict().keys() if isinstance(states[name], dict) else ()
        )
        for key in wrong:
            if not isinstance(key, str) or hasattr(each, key):
                raise _misfit(name, f"it holds {key!r}, which is no part of the state here")


def load_states(stateful: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Hand states to the objects of these names.

    Raises:
        Error: an object refuses what it is given.
    """
    for name, each in stateful.items():
        try:
            each.load_state_dict(states[name])
        except Exception as error:  # the object's own, of whatever the file passes to it
            raise _misfit(name, f"{type(error).__name__}: {error}") from error


def _misfit(name: str, why: str) -> Error:
    return Error(
        f"The checkpoint's state of {name} does not fit the one given",
        got=why,
        fix=f"pass the {name} that was saved",
    )


def encoded(name: str, stateful: Any) -> Any:
    """Return the state of an object in its JSON form.

    Raises:
        Error: it has none.
    """
    state = {
        key: dict(value) if isinstance(value, dict) else value
        for key, value in stateful.state_dict().items()
    }
    try:
        tensors, _ = trees.flatten(state, name)
        if tensors:  # a form of their shapes is all that there would be
            raise TypeError(f"{len(tensors)} tensors have no JSON form")
        return _session.encode(state)
    except TypeError as error:
        raise Error(
            f"The state of {name} cannot be kept in a checkpoint",
            got=str(error),
            fix="keep it in a file of its own",
        ) from error
