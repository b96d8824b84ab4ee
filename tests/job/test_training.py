"""Several processes train as one with the replicas of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import job_cases, jobs
from helpers.cases import few, selected
from helpers.job_cases import CASES, LOCAL, Result

pytestmark = pytest.mark.slow
# Of each kind that `make test` has; what is printed of them is looked at, too.
IN_TWO = (
    "sgd, sum",
    "sgd, combined, chunks",
    "adamw, clipped, anchors",
    "half, scaled automatically",
    "adam in parts",
    "adamw in parts, clipped, float64",
    "lamb in parts",
    "groups over processes",
    "machines",
)
FEW_IN_FOUR = ("adam in parts", "batch norm", "exchanges over processes")
IN_FOUR = (
    "sgd, sum",
    "lamb, every second output",
    "adam, running, outputs added up",
    "adamw, clipped, anchors",
    "batch norm",
    "half, scaled automatically",
    "adam in parts",
    "adamw in parts, clipped, float64",
    "lamb in parts",
    "dropout",
    "exchanges over processes",
    "groups over processes",
    "machines",
)
Results = dict[int, dict[str, dict[str, Any]]]


def job(folder: Path, processes: int, *names: str) -> tuple[Results, str]:
    """Return by process what came of each case in one job, and what process 0 printed."""
    ended = jobs.run("helpers.job_cases", [folder, *names], processes, folder)
    assert all(code == 0 for code, _ in ended.values()), ended
    return {index: torch.load(folder / f"{index}.pt") for index in ended}, ended[0][1]


@pytest.fixture(scope="module")
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, str]:
    """The cases in two processes."""
    return job(tmp_path_factory.mktemp("two"), 2, *{*IN_TWO, *selected(request, "two")})


@pytest.fixture(scope="module")
def four(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Results, str]:
    """One of each kind in four."""
    return job(tmp_path_factory.mktemp("four"), 4, *{*FEW_IN_FOUR, *selected(request, "four")})


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    """Compare relative to the largest element."""
    scale = theirs.double().abs().max().item() or 1.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= tolerance * scale, f"{difference / scale} of the largest"


def part(value: torch.Tensor, process: int, processes: int, row: tuple[int, ...]) -> torch.Tensor:
    """Return what one process has of the results of all replicas.

    Args:
        value: by step, then by replica.
        process: which one.
        processes: how many there are.
        row: shape of what a replica returns at a step.
    """
    rows = value.reshape(-1, processes * LOCAL, *row)
    return rows[:, process * LOCAL : (process + 1) * LOCAL].flatten(0, 1)


def compare(results: Results, name: str) -> None:
    """Compare what the processes have with one process that has all replicas."""
    case, processes = CASES[name], len(results)
    alone = job_cases.run(case, 0, processes, alone=True)
    for process, of_process in results.items():
        own = Result(**of_process[name])
        for key, weight in own.weights.items():
            if "running" not in key or process == 0:  # statistics: those of its first replica
                close(weight, alone.weights[key], case.tolerance)
        assert own.state.keys() == alone.state.keys()
        for key, moment in own.state.items():
            close(moment, alone.state[key], 20 * case.tolerance)
        for ours, theirs in zip(own.outputs, alone.outputs, strict=True):
            expected = part(theirs, process, processes, (3, *theirs.shape[1:]))
            close(ours.reshape(expected.shape), expected, 20 * case.tolerance)
        for ours, theirs in zip(own.losses, alone.losses, strict=True):
            expected = part(theirs, process, processes, ())
            close(ours.reshape(-1), expected, 20 * case.tolerance)
        for key, anchor in own.anchors.items():
            theirs = alone.anchors[key]
            of_replicas = key == "gradient"
            expected = part(theirs, process, processes, (3,)) if of_replicas else theirs
            close(anchor.reshape(expected.shape), expected, 20 * case.tolerance)


@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize("name", few(CASES, *IN_TWO))
def test_two_processes_train_as_one_with_all_replicas(two: Any, name: str) -> None:
    compare(two[0], name)


@pytest.mark.spec("parallel", 36)
@pytest.mark.parametrize("name", few(IN_FOUR, *FEW_IN_FOUR))
def test_four_processes_train_as_one_with_all_replicas(four: Any, name: str) -> None:
    compare(four[0], name)


def test_processes_keep_parts_of_the_optimizers_state(two: Any, four: Any) -> None:
    """Of the two large weights; the small ones, and the count of updates, are whole."""
    large, small = 2 * 4 * (6 * 400 + 400 * 3), 2 * 4 * 403 + 4
    for results, _ in (two, four):
        padding = 2 * 4 * 64  # of each part, at most
        for own in results.values():
            kept = own["adam in parts"]["moments"] - small
            assert large <= len(results) * kept <= large + len(results) * padding
    results, printed = two
    assert "because updated weights are anchored" in printed
    lines = results[0]["adam in parts"]["program"].splitlines()
    assert [line.split("  #")[0].strip() for line in lines if "over" in line] == [
        "scatter accum.* mean over 2 processes",
        "reduce accum.* mean over 2 processes",
        "gather param.* over 2 processes",
    ]


def test_norms_of_what_lies_in_parts_are_added_up(two: Any) -> None:
    results, _ = two
    sizes = {"adamw in parts, clipped, float64": 8, "lamb in parts": 16}
    for name, size in sizes.items():
        lines = [line.strip() for line in results[0][name]["program"].splitlines()]
        assert f"reduce squares sum over 2 processes  # 1 bucket, {size} bytes" in lines, name


def test_the_plan_says_what_processes_exchange(two: Any) -> None:
    results, _ = two
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
    assert "nothing overlaps" in lines[3]
    lines = results[0]["machines"]["program"].splitlines()
    reduce = "reduce accum.* mean over 2 processes  # 1 bucket,"
    assert [line.split(";")[0] for line in lines] == [
        "repeat 2 iterations",
        "  run gradients(param.*, batch[i,2 lanes], accum.*) -> loss, output.*, accum.*, value.*",
        f"  {reduce} 363008 bytes, while the next graph runs",
        "  run gradients left(param.*, batch[i,2 lanes], accum.*, value.*) -> accum.*",
        f"  {reduce} 720896 bytes, after all gradients",
        "  run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, optstate.*",
        "emit loss, output.* final",
    ]
    assert "; 363008 bytes overlap; update divides" in lines[4]
    lines = results[0]["sgd, sum"]["program"].splitlines()
    assert "  reduce accum.* sum over 2 processes" in [line.split("  #")[0] for line in lines]
