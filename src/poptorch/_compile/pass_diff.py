"""Show as text what a pass has changed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from .._ir.block_labels import pass_of
from .._ir.compiler_pass import Pass
from .._ir.graph import Graph
from .compilation import Compilation


def change(before: Compilation, after: Compilation) -> list[str]:
    """Return the lines that a pass has removed and added, with one line around each change."""
    pair = [*text_of(before)], [*text_of(after)]
    return [*difflib.unified_diff(*pair, n=1, lineterm="")][2:]


def summary(each: Pass, changed: list[str]) -> str:
    counts = [sum(line[:1] == sign for line in changed) for sign in "+-"]
    what = "adds {} lines, removes {}".format(*counts) if changed else "changes nothing"
    return f"{each.name}: {what}"


def text_of(made: Compilation) -> Iterator[str]:
    """Yield the lines of what was made last."""
    if made.staged is not None:
        yield from str(made.staged.schedule).splitlines()
        for graph in made.staged.graphs.values():
            yield from _lines(graph)
    elif made.split_step is not None:
        for graph in made.split_step.graphs.values():
            yield from _lines(graph)
    elif made.program is not None:
        yield from str(made.program).splitlines()
        for graph in made.program.graphs.values():
            yield from _lines(graph)
    elif made.flat is not None:
        yield from (f"part {shard.part}" for shard in made.flat.shards)
        yield from (f"bundle {bundle.slot}" for bundle in made.flat.bundles)
        yield from _lines(made.flat.graph)
    elif made.layout is not None:
        yield from _lines(made.layout.graph)
    elif made.batched is not None:
        yield from _lines(made.batched.micro.graph)
    elif made.micro is not None:
        yield from _lines(made.micro.graph)


def _lines(graph: Graph) -> Iterator[str]:
    """Yield the lines of a graph, with the stage pass of operators that have one."""
    placed = {node.name: stage_pass for node in graph.operators if (stage_pass := pass_of(node))}
    for line in str(graph).splitlines():
        stage_pass = placed.get(line.split()[0]) if line[:2] == "  " else None
        yield line if stage_pass is None else f"{line}  # {stage_pass}"
