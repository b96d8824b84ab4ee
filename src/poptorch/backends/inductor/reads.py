"""Kernels keep their dependencies on writes in place when torch's scheduler changes their loops.

A tensor that an operator writes into, as dropout draws its mask, has another name afterwards in
torch's scheduler. Where the scheduler makes a kernel's loops anew, to fuse them with others, it
takes the names from before any write, and in torch 2.11 the additional dependencies are gone as
well: kernels may then run before the values that they read are written.
"""

from __future__ import annotations

import functools
from typing import Any

from ..._base import private


def keep_dependencies(nodes: list[Any]) -> list[Any]:
    """Let each of a scheduler's nodes read with new loops what it read with the old ones.

    Args:
        nodes: before they are fused; these objects are changed, no class is.
    """
    for node in nodes:
        for part in node.get_nodes():
            usual = getattr(part, "recompute_size_and_body", None)
            if usual is not None:  # calls of libraries have no loops
                part.recompute_size_and_body = functools.partial(_recompute, part, usual)
    return nodes


def _recompute(node: Any, usual: Any, *arguments: Any, **options: Any) -> None:
    kinds = (private.StarDep, private.WeakDep)
    additional = private.OrderedSet([d for d in node.read_writes.reads if isinstance(d, kinds)])
    usual(*arguments, **options)
    kept = node.read_writes.with_read(additional).rename(node.mutation_renames)
    node.set_read_writes(kept)
