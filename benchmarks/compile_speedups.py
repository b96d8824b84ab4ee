"""Measure how much longer compiling takes without each replacement for a function of torch.

Every figure comes from its own process with empty caches, as in ``compile_cost.py``. Seconds are
processor seconds of Python and of the C++ compiler up to the first optimised step. Calls of Python
functions while a graph is lowered, and the bytes that the C++ compiler reads, hardly vary.

A replacement that saves nothing any more, for example because torch has become faster, should be
deleted. The docstring of ``poptorch._cpu`` contains the results.

Usage: python benchmarks/compile_speedups.py [PART OF A NAME ...] [--rounds N] [--counts]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import compile_cost

Disable = Callable[[], None]


def without(given: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return what remains of a table without some rows, which must exist."""
    remaining = dict(given)
    for name in names:
        del remaining[name]
    return remaining


def without_replacement(*names: str) -> Disable:
    """Return a function after which torch's own functions with these names are used."""

    def disable() -> None:
        from poptorch._cpu import compile_speedups

        usual = compile_speedups.replacements

        def fewer() -> dict[str, Any]:
            return without(usual(), names)

        mock.patch.object(compile_speedups, "replacements", fewer).start()

    return disable


def without_setting(*names: str) -> Disable:
    """Return a function after which these settings of torch's compiler are not changed."""

    def disable() -> None:
        from poptorch._cpu import compile_speedups

        usual = compile_speedups.settings

        def fewer() -> dict[str, Any]:
            return without(usual(), names)

        mock.patch.object(compile_speedups, "settings", fewer).start()

    return disable


def replaced(module: str, name: str, value: Any) -> Disable:
    """Return a function that replaces a name of one of our modules."""
    return lambda: mock.patch(f"poptorch._cpu.{module}.{name}", value).start()


def without_vector_answers() -> None:
    """Let torch try out which vectors the processor has."""
    without_replacement("check_build")()
    without_setting("vec_isa_ok")()


def without_subexpressions() -> None:
    """Lower graphs in which common subexpressions remain."""
    from poptorch._base import private

    usual = private.optional
    mock.patch.object(
        private, "optional", lambda name: None if name == "fx_graph_cse" else usual(name)
    ).start()


NEVER = re.compile("(?!)")
# For each replacement, the models in which it matters, and how to disable it.
REPLACEMENTS: dict[str, tuple[tuple[str, ...], Disable]] = {
    "few headers": (
        ("mlp", "cnn", "bert-4"),
        replaced("headers", "folder", lambda compiler: None),
    ),
    "an empty library": (("mlp",), replaced("headers", "_TORCHS", NEVER)),
    "check_build": (("mlp",), without_replacement("check_build")),
    "check_build and vec_isa_ok": (("mlp",), without_vector_answers),
    "no precompiled headers": (("mlp",), without_setting("cpp_cache_precompile_headers")),
    "longest function with -O1": (
        ("mlp", "cnn"),
        without_replacement("write_entry_point_signature"),
    ),
    "the wrapper as a source": (
        ("resnet",),
        replaced("compile_speedups", "are_two", lambda graph: False),
    ),
    "stride": (("cnn",), without_replacement("stride_at_vec_range")),
    "one handler": (("cnn",), without_replacement("DtypePropagationOpsHandler")),
    "patterns": (("cnn",), replaced("compile_speedups", "patterns", lambda graph: {})),
    "simplify without ranges": (("cnn",), without_replacement("simplify_with_ranges")),
    "indices are simplified once": (("cnn",), without_replacement("simplify")),
    "loops that never run": (("cnn",), without_replacement("codegen")),
    "values behind products": (("mlp", "cnn"), without_replacement("incremental_update")),
    "equal ranges": (("mlp", "cnn"), without_replacement("tighten")),
    "templates": (("mlp",), replaced("backend", "parsed_when_used", contextlib.nullcontext)),
    "torch's folders": (
        ("mlp",),
        without_replacement("get_torch_related_args", "get_cpp_torch_device_options"),
    ),
    "layers that repeat": (("bert-4",), replaced("compiler", "_compile_repeats", lambda *_: None)),
    "common subexpressions": (("cnn",), without_subexpressions),
}
ALL = "with all"


def inside(model: str, left_out: str, contestant: str) -> None:
    """Run one step in this process without one replacement, and print the cost of its parts."""
    if left_out != ALL:
        REPLACEMENTS[left_out][1]()
    compile_cost.inside(model, contestant)


def fresh(model: str, left_out: str, contestant: str) -> dict[str, Any]:
    """Measure in a new process without any cached files."""
    with tempfile.TemporaryDirectory(prefix="compile-speedups-") as folder:
        command = [sys.executable, __file__, "--inside", contestant, model, left_out]
        environment = compile_cost.environment_in(folder, compile_cost.HERE.parent)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{model} without {left_out}: {done.stderr}")
    parts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return parts


def measured(model: str, left_out: str, rounds: int) -> list[float]:
    """Return the differences in seconds between pairs of compilations, without and with."""
    return [
        fresh(model, left_out, "ours")["total"] - fresh(model, ALL, "ours")["total"]
        for _ in range(rounds)
    ]


def print_seconds(left_out: str, rounds: int) -> None:
    """Print how many seconds longer each model takes without a replacement."""
    for model in REPLACEMENTS[left_out][0]:
        extra = measured(model, left_out, rounds)
        print(
            f"{left_out:28s} {model:7s} {statistics.median(extra):+6.2f} s "
            f"({', '.join(f'{each:+.2f}' for each in extra)})",
            flush=True,
        )


def print_counts(left_out: str) -> None:
    """Print how many more calls of Python functions and bytes there are without a replacement."""
    for model in REPLACEMENTS[left_out][0]:
        less, more = (fresh(model, each, "counts") for each in (ALL, left_out))
        growth = (f"{part} {more[part] / less[part] - 1:+.1%}" for part in ("lowering", "C++"))
        print(f"{left_out:28s} {model:7s} {', '.join(growth)}", flush=True)


def main() -> None:
    """Print a line for each replacement and model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts of names of replacements")
    parser.add_argument(
        "--rounds", type=int, default=1, help="measurements of each figure (default: 1)"
    )
    parser.add_argument("--counts", action="store_true", help="calls and bytes instead of seconds")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        inside(*chosen.names, chosen.inside)
        return
    for left_out in REPLACEMENTS:
        if chosen.names and not any(name in left_out for name in chosen.names):
            continue
        if chosen.counts:
            print_counts(left_out)
        else:
            print_seconds(left_out, chosen.rounds)


if __name__ == "__main__":
    main()
