"""Several processes train as one with the replicas of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from helpers import job_cases, jobs
from helpers.job_cases import CASES, LOCAL, Result

pytestmark = pytest.mark.slow
PROCESSES = 2


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """By process, what came of each case in one job."""
    folder = tmp_path_factory.mktemp("job")
    ended = jobs.run(["-m", "helpers.job_cases", folder], PROCESSES, folder)
    assert all(code == 0 for code, _ in ended.values()), ended
    return {index: torch.load(folder / f"{index}.pt") for index in ended}


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Compare relative to the largest element."""
    scale = theirs.double().abs().max().item() or 1.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= tolerance * scale, f"{difference / scale} of the largest"


def part(value: torch.Tensor, process: int, row: tuple[int, ...]) -> torch.Tensor:
    """Return what one process has of the results of all replicas.

    Args:
        value: by step, then by replica.
        process: which one.
        row: shape of what a replica returns at a step.
    """
    rows = value.reshape(-1, PROCESSES * LOCAL, *row)
    return rows[:, process * LOCAL : (process + 1) * LOCAL].flatten(0, 1)


@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one_with_all_replicas(results: Any, name: str) -> None:
    case = CASES[name]
    alone = job_cases.run(case, 0, PROCESSES, alone=True)
    for process, of_process in results.items():
        own = Result(**of_process[name])
        for key, weight in own.weights.items():
            if "running" not in key or process == 0:  # statistics: those of its first replica
                close(weight, alone.weights[key], case.tolerance)
        for ours, theirs in zip(own.outputs, alone.outputs, strict=True):
            expected = part(theirs, process, (3, *theirs.shape[1:]))
            close(ours.reshape(expected.shape), expected, 20 * case.tolerance)
        for ours, theirs in zip(own.losses, alone.losses, strict=True):
            close(ours.reshape(-1), part(theirs, process, ()), 20 * case.tolerance)
        for key, anchor in own.anchors.items():
            theirs = alone.anchors[key]
            expected = part(theirs, process, (3,)) if key == "gradient" else theirs
            close(anchor.reshape(expected.shape), expected, 20 * case.tolerance)


def test_the_plan_says_what_processes_exchange(results: Any) -> None:
    lines = results[0]["sgd, combined, chunks"]["program"].splitlines()
    assert [line.split("  #")[0].strip() for line in lines] == [
        "repeat 2 iterations",
        "repeat 2 chunks of 4 lanes",
        "run micro(param.*, batch[i,c,4 lanes], accum.*) -> loss, output.*, accum.* +=",
        "reduce accum.* mean over 2 processes",
        "run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*",
        "emit loss, output.* final",
    ]
    assert "1 bucket, " in lines[3]
    lines = results[0]["sgd, sum"]["program"].splitlines()
    assert "  reduce accum.* sum over 2 processes" in [line.split("  #")[0] for line in lines]
