"""Run a user's script, and work with the wrapped models that it calls or compiles."""

from __future__ import annotations

import contextlib
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .._base.private import replaced
from ..executor import PoplarExecutor
from .commands import Misuse

# receives a wrapped model, and the arguments of its first call or compilation
FirstCall = Callable[[PoplarExecutor, tuple[Any, ...], Mapping[str, Any]], None]


class EndOfScript(BaseException):
    """Raised to end a script that has run far enough. It derives from ``BaseException``, so that
    ``except Exception`` does not catch it.
    """


def run_script(path: str, arguments: Sequence[str], function: str = "") -> None:
    """Run a script, or only import it and call a function of it."""
    before = sys.argv, sys.path[:]
    sys.argv, sys.path[0:0] = [path, *arguments], [str(Path(path).resolve().parent)]
    try:
        with contextlib.suppress(EndOfScript):
            names = runpy.run_path(path, run_name="imported" if function else "__main__")
            if function:
                if not callable(names.get(function)):
                    raise Misuse(f"{path} has no function {function}")
                names[function]()
    finally:
        sys.argv, sys.path[:] = before


def at_first_call(
    work: FirstCall, path: str, arguments: Sequence[str], function: str = "", every: bool = False
) -> None:
    """Run a script until it calls or compiles a wrapped model, then work with the model and end
    the script.

    Args:
        work: is called before the script's own call.
        path, arguments, function: as for ``run_script``.
        every: work with every model when it is first called, and end the script only at its end.

    Raises:
        Misuse: the script used no wrapped model.
    """
    seen: list[PoplarExecutor] = []

    def call(usual: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> Any:
        if executor not in seen:
            seen.append(executor)
            work(executor, args, kwargs)
            if not every:
                raise EndOfScript
        return usual(executor, *args, **kwargs)

    with replaced(PoplarExecutor, "__call__", call), replaced(PoplarExecutor, "compile", call):
        run_script(path, arguments, function)
    if not seen:
        raise Misuse(f"{path} used no wrapped model")
