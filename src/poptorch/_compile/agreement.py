"""What the processes of a job must have in common before they train: the program and its options.

Each compiles its own; a digest of what the program depends on is compared, and the texts only where
digests differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from .. import _job
from .._base import trees
from .._base.errors import Error
from .._ir.plan import Plan
from .._ir.spec import Spec
from . import lanes
from .cache import differences, facts_of

_SHOWN = 3


def meet(spec: Spec) -> None:
    """Meet the other processes of the job, unless that has been done.

    Raises:
        Error: they do not meet.
    """
    _job.join(spec.target.process_id, spec.loops.processes, spec.runtime.process_timeout)


def with_common_budget(spec: Spec) -> Spec:
    """Return the settings with the memory for lanes that every process has.

    It is a share of what is free, which is not the same everywhere; the programs have to be.
    """
    budget = spec.lane_memory or lanes.default_budget()
    return replace(spec, lane_memory=min(_job.current().numbers(budget, "the memory for lanes")))


def check_alike(
    plan: Plan, backend: str, arguments: Mapping[str, trees.Structure], beside: Mapping[str, str]
) -> None:
    """Compare this process's program and options with those of the others.

    Args:
        plan, backend, arguments: what is compiled.
        beside: further facts by name.

    Raises:
        Error: they are not those of process 0; it is raised in every process.
    """
    _check_lengths()
    facts = {**facts_of(plan, backend, arguments), **beside}
    there = _job.current().compare(facts, "digests of their programs and options")
    if not there:
        return
    first = there.pop(0)
    lines = []
    for index, own in there.items():
        apart = differences(own, first)
        lines += [
            f"process {index}, against process 0 ('there'): {line}" for line in apart[:_SHOWN]
        ]
        if len(apart) > _SHOWN:
            lines.append(f"process {index}: and {len(apart) - _SHOWN} more")
    raise Error(
        "The processes of this job do not train the same program",
        got="\n".join(lines),
        fix="give all of them the same model, options, optimizer and sizes of batches",
    )


def _check_lengths() -> None:
    """Compare for how many calls the processes have data, where loaders have said so.

    Raises:
        Error: one would wait for another that has no more.
    """
    lengths = _job.current().numbers(_job.lengths.latest(), "the lengths of their data")
    known = {index: length for index, length in enumerate(lengths) if length >= 0}
    if len({*known.values()}) > 1:
        raise Error(
            "The processes of this job have data for different numbers of calls",
            got="; ".join(f"process {index}: {length}" for index, length in known.items()),
            fix=(
                "let poptorch.DataLoader divide the data, with drop_last=True",
                "give each process as many samples as the others",
            ),
        )
