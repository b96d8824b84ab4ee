"""Accept arguments under the names of other releases of PopTorch, or of their documents."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def also_called(
    notify: Callable[[str, str], None] = lambda old, new: None, /, **names: str
) -> Callable[[Function], Function]:
    """Also accept a keyword under another name: ``also_called(loss="x")``. Report each use with
    ``notify``.

    Raises:
        TypeError: the function is called with both names.
    """

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for other in names.keys() & kwargs.keys():
                name = names[other]
                if name in kwargs:
                    raise TypeError(
                        f"{function.__name__}() got {name!r} twice: {other!r} is another name "
                        "for the same argument"
                    )
                kwargs[name] = kwargs.pop(other)
                notify(f"{function.__name__}({other}=)", f"{name}=")
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate
