"""Make compiling faster with replacements for functions of torch, each of which can be disabled.

The docstring of the package says how much time each of them saves.
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

from .._base import interrupts, private, timing
from .._base.resources import IDLE, Cores
from . import headers, joint_kernels, symbolic_indices, unneeded_work
from .toolchain import has_vectors

aten = torch.ops.aten
LARGE = 1000  # number of operators
_POLL_SECONDS = 0.05  # seconds between two checks whether compilers have ended


def are_two(graph: fx.Graph) -> bool:
    """Return whether the wrapper should be a separate C++ source, which is compiled with -O1.

    With -O3, like the kernels, the C++ compiler takes 12.4 s for a ResNet-18 with 16 channels.
    Separately it takes 8.5 s, although it reads the headers twice. Calls are not slower.
    """
    return len(graph.nodes) >= LARGE


def settings() -> Mapping[str, Any]:
    """Disable precompiled headers, which take 8 s to compile, once per machine, and save nothing
    where few headers suffice.

    ``vec_isa_ok`` also answers if torch has another ``check_build``. Torch does not remember this
    answer for other programs, as it does that of ``check_build``.
    """
    return {"cpp_cache_precompile_headers": False} | ({"vec_isa_ok": True} if has_vectors() else {})


def replacements() -> Mapping[str, Callable[..., Any]]:
    cores = Cores()
    cores.idle()

    def build(usual: Callable[..., None], lock_path: str, cpp_builders: Any) -> None:
        """Build sources in parallel if a core is idle. Torch's function then finds the results."""
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
        "tighten": tighten,
        "try_loop_split": split_if_equal,
        "write_entry_point_signature": _entry,
        "worker_compile_cpp": build,
        "cpp_pybinding": joint_kernels.together(),
        "get_torch_related_args": _paths,
        "get_cpp_torch_device_options": _for_the_device,
        **unneeded_work.replacements(),
    }
    if has_vectors():  # torch also asks the processor, and then tries it out in a library
        named["check_build"] = lambda usual, self, code: True
    return named


def build_together(builders: Sequence[Any]) -> None:
    """Build sources in parallel. If this is interrupted, all compilers end, and nothing waits for
    them.
    """
    given_up = threading.Event()
    with ThreadPoolExecutor(len(builders)) as pool:
        builds = [pool.submit(headers.build, each, given_up.is_set) for each in builders]
        try:
            for build in builds:
                build.result()
        except BaseException:
            given_up.set()
            with interrupts.deferred():  # because another Ctrl-C could leave some of them running
                while concurrent.futures.wait(builds, _POLL_SECONDS).not_done:
                    _end_compilers(builders)
            raise


def _end_compilers(builders: Sequence[Any]) -> None:
    """End this process's C++ compilers of some sources, and their child processes."""
    sources = {str(each._sources_args) for each in builders}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if sources.intersection(process.cmdline()):
                process.kill()


def _paths(usual: Callable[..., Any], include_pytorch: bool, aot_mode: bool) -> Any:
    """Return torch's headers, folder and libraries. Torch uses setuptools to find them, which takes
    0.06 s.
    """
    if aot_mode:
        return usual(include_pytorch, aot_mode)
    torchs = Path(torch.__file__).parent
    own = [torchs / "include", torchs / "include" / "torch" / "csrc" / "api" / "include"]
    return [*map(str, own)], [str(torchs / "lib")], ["torch", "torch_cpu", "torch_python"]


def _for_the_device(
    usual: Callable[..., Any],
    device_type: str,
    aot_mode: bool = False,
    compile_only: bool = False,
) -> Any:
    """Return what the C++ compiler needs in addition for a device: for a CPU, torch's folder of
    libraries. Torch imports setuptools to find it, which takes 0.06 s.
    """
    if aot_mode or device_type != "cpu":
        return usual(device_type, aot_mode, compile_only)
    # definitions, headers, flags, flags of the linker, folders of libraries, libraries, and others
    return [], [], [], [], [str(Path(torch.__file__).parent / "lib")], [], []


def _entry(usual: Callable[..., None], self: Any) -> None:
    """Begin the wrapper's only long function, which needs little optimisation."""
    self.prefix.writeline('__attribute__((optimize("O1")))')
    usual(self)


def tighten(usual: Callable[..., Any], self: Any, other: Any) -> Any:
    """Return the values that are in two ranges. Nearly always the ranges are equal, and torch would
    simplify their limits.
    """
    return self if self == other else usual(self, other)


def split_if_equal(usual: Callable[..., Any], self: Any, nodes: Any) -> Any:
    """Split the loops of nodes as torch does, or leave them, because splitting only saves time.

    Torch asserts that all of them are split in the same way, before it changes any. The assertion
    fails for the group norms of a small ResNet.
    """
    try:
        return usual(self, nodes)
    except AssertionError:
        return nodes


def stride(usual: Callable[..., Any], index: Any, var: Any, vec_length: int | None = None) -> Any:
    """Return how far an index moves when a variable increases by one, like torch's function.

    Torch simplifies a difference. Nearly all indices are sums of sizes times variables, or times
    quotients and remainders of a variable, which are constant or increase with the variable in a
    vector. Symbolic sizes are factors, too.
    """
    import sympy

    step = sympy.S.Zero
    for term in sympy.Add.make_args(index):
        if var in term.free_symbols:
            factor, rest = term.as_coeff_Mul()
            if rest.is_Mul:
                others, rest = rest.as_independent(var, as_Add=False)
                factor *= others
            grown = _grown(rest, var, vec_length)
            if grown is None or not factor.is_integer:
                return usual(index, var, vec_length)
            step += factor * grown
    return step


def _grown(value: Any, var: Any, vec_length: int | None) -> Any:
    """Return the increase of a variable, quotient or remainder in one step; None if it is
    not known.
    """
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
    """Simplify an index. Only quotients and remainders need the ranges of variables."""
    import sympy

    simple = self.simplify(expr)
    if symbolic_indices.is_symbolic(simple, var_ranges):
        simple = expr = symbolic_indices.simplified(simple, var_ranges)
    return usual(self, expr, var_ranges) if simple.atoms(sympy.Function) else simple


def patterns(graph: fx.Graph) -> Mapping[str, Callable[..., Any]]:
    """Let torch trace its patterns, which takes 0.2 s, only if one may apply: for a softmax or a
    permutation.
    """
    is_needed = any(
        node.target is aten.randperm.default
        or (node.target is aten.div.Tensor and _target(node.args[0]) is aten.exp.default)
        for node in graph.nodes
    )
    return {"lazy_init": lambda usual, *device: usual(*device) if is_needed else None}


def _target(argument: Any) -> Any:
    return argument.target if isinstance(argument, fx.Node) else None
