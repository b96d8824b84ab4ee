"""What makes compiling quicker: stand-ins for functions of torch's, each a switch of its own.

Processor time of the tutorial CNN's first program, 10.6 s, torch 2.13: without ``stride`` 4 s more,
without ``check_build`` 3, without ``_entry`` 2.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch
from filelock import FileLock
from torch import fx

from ..._base import interrupts, private, timing
from ..._base.resources import IDLE, Cores
from . import headers, kernels
from .toolchain import has_vectors

aten = torch.ops.aten
LARGE = 1000  # operators
_LOOKING = 0.05  # seconds between two looks for compilers to end


def are_two(graph: fx.Graph) -> bool:
    """Tell whether the wrapper shall be a C++ source of its own, which gets -O1.

    With -O3, like the kernels, it takes 13.8 of 18.4 s for a BERT of 4 layers, of its own 5.0 and
    1.4 for reading torch's headers again. A call is no slower.
    """
    return len(graph.nodes) >= LARGE


def settings() -> Mapping[str, Any]:
    """Headers compiled in advance take about 6 s, once per machine, and save 1.1 s a source."""
    return {"cpp_cache_precompile_headers": False} | ({"vec_isa_ok": True} if has_vectors() else {})


def stand_ins() -> Mapping[str, Callable[..., Any]]:
    cores = Cores()
    cores.idle()

    def build(usual: Callable[..., None], lock_path: str, cpp_builders: Any) -> None:
        """Build sources side by side where a core is idle; torch's function finds it done."""
        *parts, last = cpp_builders  # the last one links the others, if there are any
        with FileLock(f"{lock_path}.parts"), timing.part("C++ compiler"):
            if len(parts) > 1 and cores.idle() >= IDLE:
                build_together(parts)
            for part in [*parts, last]:
                if not Path(part.get_target_file_path()).exists():
                    headers.build(part)
        usual(lock_path, cpp_builders)

    named: dict[str, Callable[..., Any]] = {
        "DtypePropagationOpsHandler": functools.cache(lambda usual: usual()),
        "simplify_with_ranges": simplify,
        "stride_at_vec_range": stride,
        "try_loop_split": split_if_alike,
        "write_entry_point_signature": _entry,
        "worker_compile_cpp": build,
        "cpp_pybinding": kernels.together(),
        "get_torch_related_args": _paths,
    }
    if has_vectors():  # torch asks the processor, too, then tries it out in a library
        named["check_build"] = lambda usual, self, code: True
    return named


def build_together(builders: Sequence[Any]) -> None:
    """Build sources side by side; if that is interrupted, no compiler goes on, and nobody waits."""
    given_up = threading.Event()
    with ThreadPoolExecutor(len(builders)) as pool:
        builds = [pool.submit(headers.build, each, given_up.is_set) for each in builders]
        try:
            for build in builds:
                build.result()
        except BaseException:
            given_up.set()
            with interrupts.deferred():  # as another Ctrl-C would leave some of them
                while concurrent.futures.wait(builds, _LOOKING).not_done:
                    _end_compilers(builders)
            raise


def _end_compilers(builders: Sequence[Any]) -> None:
    """End this process's C++ compilers of some sources, and what they have started."""
    sources = {str(each._sources_args) for each in builders}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if sources.intersection(process.cmdline()):
                process.kill()


def _paths(usual: Callable[..., Any], include_pytorch: bool, aot_mode: bool) -> Any:
    """Return torch's headers, folder and libraries, which torch finds with setuptools: 0.06 s."""
    if aot_mode:
        return usual(include_pytorch, aot_mode)
    torchs = Path(torch.__file__).parent
    own = [torchs / "include", torchs / "include" / "torch" / "csrc" / "api" / "include"]
    return [*map(str, own)], [str(torchs / "lib")], ["torch", "torch_cpu", "torch_python"]


def _entry(usual: Callable[..., None], self: Any) -> None:
    """Torch begins the wrapper's only long function, which need not be optimised much."""
    self.prefix.writeline('__attribute__((optimize("O1")))')
    usual(self)


def split_if_alike(usual: Callable[..., Any], self: Any, nodes: Any) -> Any:
    """Split the loops of nodes as torch does, or leave them: to split them only saves time.

    That all are split alike is an assertion of torch's, before it changes any of them. It fails for
    the group norms of a small ResNet.
    """
    try:
        return usual(self, nodes)
    except AssertionError:
        return nodes


def stride(usual: Callable[..., Any], index: Any, var: Any, vec_length: int | None = None) -> Any:
    """Return how far an index moves when a variable grows by one, as torch's own function does.

    Torch simplifies a difference. Nearly all indices are sums of numbers times variables, or times
    quotients and remainders of one, which stay as they are or grow with it in a vector.
    """
    import sympy

    step = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if var in term.free_symbols:
            factor, rest = term.as_coeff_Mul()
            grown = _grown(rest, var, vec_length)
            if grown is None or not factor.is_Integer:
                return usual(index, var, vec_length)
            step += factor * grown
    return step


def _grown(value: Any, var: Any, vec_length: int | None) -> Any:
    """Return how much larger a variable, quotient or remainder is for the next; None: not known."""
    if value == var:
        return 1
    kind, (of, *numbers) = type(value), value.args or (None,)
    if of != var or kind not in (private.FloorDiv, private.ModularIndexing):
        return None
    if not vec_length or not all(number.is_Integer for number in numbers):
        return None
    divisor, *modulus = numbers
    if divisor % vec_length == 0:
        return 0
    if divisor == 1 and modulus[0] % vec_length == 0:
        return 1
    return value.subs(var, var + 1) - value


def simplify(usual: Callable[..., Any], self: Any, expr: Any, var_ranges: Any) -> Any:
    """Simplify an index; only quotients and remainders need the ranges of variables."""
    import sympy

    simple = self.simplify(expr)
    return usual(self, expr, var_ranges) if simple.atoms(sympy.Function) else simple


def patterns(graph: fx.Graph) -> Mapping[str, Callable[..., Any]]:
    """Let torch trace its patterns, 0.2 s, where one may apply: a softmax or a permutation."""
    wanted = any(
        node.target is aten.randperm.default
        or (node.target is aten.div.Tensor and _target(node.args[0]) is aten.exp.default)
        for node in graph.nodes
    )
    return {"lazy_init": lambda usual, *device: usual(*device) if wanted else None}


def _target(argument: Any) -> Any:
    return argument.target if isinstance(argument, fx.Node) else None
