"""The C++ sources of a graph: how much they are optimised, how many there are, how they are built.

The wrapper in C++ has one long function that calls the kernels and frees what they do not need.
With -O3, like them, it takes most of the C++ compiler's time: processor time for a BERT of 4
layers 13.8 of 18.4 s. A source of its own gets -O1: 5.0 s. A call is no slower (the CNN, 600
alternating calls: 1.77 ms against 1.82; with -O0 1.87). But it reads the headers again, 1.4 s,
which more than half of a small program's time goes to. In one source the function alone gets -O1,
but not its templates: the CNN takes 3.8 s instead of 5.1 in two sources, a ResNet-18 13.4 instead
of 11.1. So there are two where the graph is large, and where an idle core builds the second.
"""

from __future__ import annotations

import functools
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from filelock import FileLock
from torch import fx

from ..._base import log, private
from ..._base.resources import IDLE, Cores

LARGE = 1000  # operators: with more, two sources
ENTRY = "void inductor_entry_impl("
QUICKLY = '__attribute__((optimize("O1")))'

# None of it changes the code: no warnings, which nobody reads, no lines for debuggers, and garbage
# is not looked for below 512 MB.
LEAN = "-w -g0 --param ggc-min-heapsize=524288"
LINKER = "gold"  # reads torch's half a million symbols in a third of the usual linker's time


class Sources:
    """C++ sources of one graph: the wrapper's and the kernels', side by side if a core is idle."""

    def __init__(self) -> None:
        self._cores = Cores()
        self._cores.idle()

    def are_two(self, graph: fx.Graph) -> bool:
        """Tell whether wrapper and kernels shall be sources of their own."""
        return len(graph.nodes) >= LARGE or self._cores.idle() >= IDLE

    def compile(self, usual: Callable[..., None], lock_path: str, cpp_builders: Any) -> None:
        """Build what can be built before it is linked; torch's function finds it done."""
        *parts, _ = cpp_builders
        if len(parts) > 1 and self._cores.idle() >= IDLE:
            with FileLock(f"{lock_path}.parts"), ThreadPoolExecutor(len(parts)) as pool:
                list(pool.map(lambda part: part.build(), parts))
        usual(lock_path, cpp_builders)


def write(
    usual: Callable[..., Any],
    content: str | bytes,
    extension: str,
    extra: str = "",
    hash_type: str = "code",
    specified_dir: str = "",
    key: str | None = None,
) -> Any:
    """Torch writes a source file: one of C++, with a function that need not be optimised much."""
    if extension.endswith("cpp") and isinstance(content, str):
        content = content.replace(ENTRY, f"{QUICKLY} {ENTRY}", 1)
    return usual(content, extension, extra, hash_type, specified_dir, key)


def run(usual: Callable[..., None], cmd_line: str, cwd: str) -> None:
    """Torch runs its C++ compiler: with less to do, and as usual where it does not take that."""
    try:
        usual(f"{cmd_line} {_less()}", cwd)
    except private.CppCompileError as error:
        cause = error.__cause__
        if isinstance(cause, subprocess.CalledProcessError) and cause.returncode < 0:
            raise  # a signal has ended it: Ctrl-C, for one
        log.engine.debug("The C++ compiler does not take %s: %s", _less(), error)
        usual(cmd_line, cwd)


@functools.cache
def _less() -> str:
    return f"{LEAN} -fuse-ld={LINKER}" if shutil.which(f"ld.{LINKER}") else LEAN
