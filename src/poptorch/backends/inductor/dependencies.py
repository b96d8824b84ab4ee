"""Which write a kernel reads is not forgotten when the kernel's loops change.

A tensor that an operator writes into, as dropout draws its mask, has another name afterwards in
torch's scheduler. Where it makes a kernel's loops anew, to fuse them with others, it takes the
names from before any write, and in 2.11 the additional dependencies are gone as well: kernels may
then run before the values that they read are written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def kept_dependencies() -> Iterator[None]:
    """Within the context new loops read what the old ones did."""
    from torch._inductor.dependencies import Dep, StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode
    from torch.utils._ordered_set import OrderedSet

    usual = SchedulerNode.recompute_size_and_body

    def recompute(node: SchedulerNode, *arguments: Any, **options: Any) -> None:
        reads = node.read_writes.reads
        additional: OrderedSet[Dep] = OrderedSet(
            [dep for dep in reads if isinstance(dep, (StarDep, WeakDep))]
        )
        usual(node, *arguments, **options)
        kept = node.read_writes.with_read(additional).rename(node.mutation_renames)
        node.set_read_writes(kept)

    SchedulerNode.recompute_size_and_body = recompute  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        SchedulerNode.recompute_size_and_body = usual  # type: ignore[method-assign]
