"""Check that the processes of a job agree before they train, for example on the program and its
options, and use common values for what depends on a machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256

import torch

from .. import _job
from .._base import log, nested_values
from .._base.errors import Error
from .._cost.links import fitted
from .._ir.plan import Plan
from .._ir.spec import Spec
from . import lanes
from .cache import differences, facts_of

_SHOWN = 3


def meet(spec: Spec) -> None:
    given, replicas = _job.membership().local_replicas, spec.loops.replicas
    if _job.from_poprun() and given != replicas:
        log.python.warning(
            (
                "poprun assigned %d replicas to this process, but the options have %d. "
                "popdist.poptorch.Options() contains the number that poprun assigned"
            ),
            given,
            replicas,
        )
    _job.join(spec.process, spec.processes, spec.runtime.process_timeout)


def with_common(spec: Spec) -> Spec:
    """Return settings with common values for what depends on machines: memory for lanes,
    and the link.
    """
    group, budget = _job.current(), spec.lane_memory or lanes.default_budget()
    memory = min(group.numbers(budget, "the memory for lanes"))
    link = None
    if len({*group.texts(_job.own_address(), "their addresses")}) > 1:
        found = fitted(group.count, *group.timings())
        link = found.latency, found.bandwidth
    return replace(spec, lane_memory=memory, target=replace(spec.target, link=link))


def check_processes_agree(
    plan: Plan,
    backend: str,
    arguments: Mapping[str, nested_values.Structure],
    more_facts: Mapping[str, str],
) -> None:
    _check_data()
    _compare(
        {**facts_of(plan, backend, arguments), **more_facts},
        "digests of their programs and options",
        "The processes of this job do not train the same program",
        "use the same model, options, optimizer and batch sizes in all processes",
    )


def check_tensors(tensors: Mapping[str, torch.Tensor]) -> None:
    _compare(
        digests(tensors),
        "digests of their first weights",
        "The processes of this job start with different weights or different state",
        (
            "use the same seed or the same file in all processes, or send the weights of process "
            "0 to all: options.Distributed.broadcastWeights(True)"
        ),
    )


def check_written(digests: Mapping[str, str]) -> None:
    _compare(
        digests,
        "digests of the weights that were written to their devices",
        "The processes of this job have written different weights to their devices",
        (
            "load the same weights in every process: after the first call of the wrapped model, "
            "the weights of process 0 are not sent to the other processes"
        ),
    )


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    flat = {key: t.detach().contiguous().view(-1).view(torch.uint8) for key, t in tensors.items()}
    return {key: sha256(t.numpy().tobytes()).hexdigest()[:12] for key, t in flat.items()}


def check_numbers(values: Mapping[str, float], state: Mapping[str, str], other: bool) -> None:
    facts = {"compiled in": "changed" if other else "as before"}
    facts |= {key: repr(value) for key, value in values.items()} | dict(state)
    _compare(
        facts,
        "the numbers of the optimizer, which changed",
        "The optimizers of the processes of this job changed in different ways",
        (
            "call setOptimizer with the same hyper-parameters in every process, and load the "
            "same state"
        ),
    )


def _compare(facts: Mapping[str, str], what: str, title: str, fix: str) -> None:
    """Raise an error that lists the differences from process 0, if there are any."""
    facts_by_process = _job.compare(facts, what)
    lines = []
    for index, own in facts_by_process.items():
        differing = differences(own, facts_by_process[0], f"in process {index}", "in process 0")
        lines += differing[:_SHOWN]
        if len(differing) > _SHOWN:
            lines.append(f"and {len(differing) - _SHOWN} more in process {index}")
    if lines:
        raise Error(title, got="\n".join(lines), fix=fix)


def _check_data() -> None:
    """Compare for how many calls the processes have data, and in which order they divide it."""
    texts = _job.current().texts(json.dumps(_job.data_length()), "the lengths of their data")
    lengths = [_job.DataLength(*json.loads(text)) for text in texts]
    seeds = {index: each.seed for index, each in enumerate(lengths) if each.seed is not None}
    if len({*seeds.values()}) > 1:
        raise Error(
            "The processes of this job shuffle the same data set with different seeds",
            got="; ".join(f"process {index}: seed {seed}" for index, seed in seeds.items())
            + "; the processes would read overlapping parts of the data set",
            fix="call options.randomSeed with the same number in every process",
        )
    known = {index: each.calls for index, each in enumerate(lengths) if each.calls >= 0}
    if len({*known.values()}) > 1:
        raise Error(
            "The processes of this job have data for different numbers of calls",
            got="; ".join(f"process {index}: {length} calls" for index, length in known.items()),
            fix=(
                "let poptorch.DataLoader divide the data set, with drop_last=True",
                "or give each process the same number of samples",
            ),
        )
    last = {index: each.last_rows for index, each in enumerate(lengths) if each.last_rows}
    if len({*last.values()}) > 1:
        raise Error(
            "The last batches of the processes of this job differ in size",
            got="; ".join(f"process {index}: {rows} rows" for index, rows in last.items()),
            fix=(
                "leave incomplete batches out: poptorch.DataLoader(..., drop_last=True)",
                "or give each process the same number of samples",
            ),
        )
