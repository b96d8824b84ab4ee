"""Jobs of several processes: they train as one; those that are lost or unlike others are named."""

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

import poptorch
from helpers import job_cases, job_killed, jobs
from helpers.cases import long
from helpers.job_cases import CASES, SAVED, Case, Result
from helpers.job_fault import DIFFERENCES
from helpers.job_killed import digests

pytestmark = pytest.mark.slow
FEW = {
    2: ["sgd, sum", "sgd, combined, chunks", "adamw, clipped, anchors",
        "adamw in parts, clipped, float64", "lamb in parts", "nadam in parts, traced",
        "adafactor not in parts, traced",
        "complex, adamw in parts, clipped", "groups over processes",
        "exchanges over processes", "machines", SAVED, "stages, sharded, batch norm"],
    4: ["adam in parts", "stages of two models"],
}  # fmt: skip
Results = list[dict[str, dict[str, Any]]]


def job(folder, processes: int, names: list[str]) -> tuple[Results, str]:
    """Return by process what came of each case in one job, and what process 0 printed."""
    ended = jobs.run("helpers.job_cases", [folder, *names], processes, folder)
    assert all(code == 0 for code, _ in ended.values()), ended
    return [torch.load(folder / f"{index}.pt") for index in ended], ended[0][1]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, case: str) -> None:
    """Compare relative to the largest element, or where stages are shared at least to 1."""
    least = 1.0 if CASES[case].parts > 1 else 0.0
    ours, theirs = (torch.view_as_real(t) if t.is_complex() else t for t in (ours, theirs))
    scale = max(theirs.double().abs().max().item(), least) or 1.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= tolerance * scale, f"{case}: {difference / scale} of the largest"


def part(value: torch.Tensor, case: Case, share: int, shares: int, *row: int) -> torch.Tensor:
    """Return what one of so many shares of all replicas returned, of a shape at each step."""
    return value.reshape(-1, shares, case.replicas, *row)[:, share].flatten(0, 1)


def compare(results: Results, name: str) -> Result:
    """Compare with one process that has all replicas and stages; return what that has."""
    case, processes = CASES[name], len(results)
    alone = job_cases.run(case, 0, processes, alone=True)
    loose = case.tolerance * (20 if case.parts == 1 else 1)
    for process, of_process in enumerate(results):
        own, share = Result(**of_process[name]), (process // case.parts, processes // case.parts)
        assert own.weights.keys() == alone.weights.keys()
        for key, weight in own.weights.items():
            # Of replicas, statistics are those of the first one of a process.
            if "running" not in key or case.parts > 1 or process == 0:
                close(weight, alone.weights[key], case.tolerance, name)
        assert own.state.keys() == alone.state.keys()
        for key, moment in own.state.items():
            close(moment, alone.state[key], loose, name)
        for ours, theirs in zip(own.outputs, alone.outputs, strict=True):
            expected = part(theirs, case, *share, 3, *theirs.shape[1:])
            close(ours.reshape(expected.shape), expected, loose, name)
        for ours, theirs in zip(own.losses, alone.losses, strict=True):
            close(ours.reshape(-1), part(theirs, case, *share), loose, name)
        for key, anchor in own.anchors.items():
            theirs = alone.anchors[key]
            expected = part(theirs, case, *share, 3) if key == "gradient" else theirs
            close(anchor.reshape(expected.shape), expected, loose, name)
        for ours, theirs in zip(own.inferred, alone.inferred, strict=True):
            close(ours, theirs, loose, name)
        # The script has added up numbers of its own meanwhile, by torch's own limit.
        assert own.exchanged is not None
        assert own.exchanged.tolist() == [sum(range(processes + 1))] * len(own.exchanged)
        assert of_process["limit"]["seconds"] == default_pg_timeout.total_seconds()
    return alone


@pytest.mark.parametrize(
    "processes, names",
    [
        long(
            2,
            [n for n, case in CASES.items() if n not in FEW[2] and case.parts * case.replicas < 3],
        ),
        long(3, ["stages over three"]),
        long(4, [name for name, case in CASES.items() if name not in FEW[4] and case.parts == 1]),
    ],
)
def test_processes_train_as_one(processes: int, names: list[str], tmp_path: Path) -> None:
    results, _ = job(tmp_path, processes, names)
    for name in names:
        compare(results, name)


def check_parts_of_state(results: Results) -> None:
    """Of the two large weights; the small ones, and the count of updates, are whole."""
    large, small = 2 * 4 * (6 * 400 + 400 * 3), 2 * 4 * 403 + 4
    padding = 2 * 4 * 64  # of each part, at most
    for own in results:
        kept = own["adam in parts"]["kept"]["OPTSTATE"] - small
        assert large <= len(results) * kept <= large + len(results) * padding


@pytest.mark.spec("parallel", 36)
def test_four_processes_train_as_one(tmp_path: Path) -> None:
    results, _ = job(tmp_path, 4, FEW[4])
    for name in FEW[4]:
        compare(results, name)
    check_parts_of_state(results)
    assert [line for line in program(results, "adam in parts") if "over" in line] == [
        "scatter accum.* mean over 4 processes",
        "reduce accum.* mean over 4 processes",
        "gather param.* over 4 processes",
    ]
    for own in results:
        assert "whose stages are on several processes cannot exchange" in own["refused"]["text"]


def program(results: Results, name: str, end: str = "  #") -> list[str]:
    """Return what the plan says that is done, line by line."""
    return [line.split(end)[0].strip() for line in results[0][name]["program"].splitlines()]


@pytest.mark.spec("parallel", 31, 36)
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    results, printed = job(tmp_path, 2, FEW[2])
    alone = {name: compare(results, name) for name in FEW[2]}
    check_stages(results, alone[SAVED], tmp_path / "saved.poptorch")
    assert "because updated weights or their gradients are anchored" in printed
    assert "Adafactor.step does not update every weight element by element" in printed
    assert "gather param.* over 2 processes" in program(results, "nadam in parts, traced")
    assert "reduce accum.* sum over 2 processes" in program(results, "sgd, sum")
    for name, regions in {"sgd, sum": 1, "adamw, clipped, anchors": 2, "machines": 0}.items():
        assert [own[name]["kept"]["regions"] for own in results] == [regions, regions], name
    for name, size in {"adamw in parts, clipped, float64": 8, "lamb in parts": 24}.items():
        line = f"reduce squares sum over 2 processes  # 1 bucket, {size} bytes"
        assert line in program(results, name, "\n")
    assert program(results, "sgd, combined, chunks") == [
        "repeat 2 iterations",
        "repeat 2 chunks of 4 lanes",
        "run micro(param.*, batch[i,c,4 lanes], accum.*) -> loss, output.*, accum.* +=",
        "reduce accum.* mean over 2 processes",
        "run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*",
        "emit loss, output.* final",
    ]
    assert "nothing overlaps" in program(results, "sgd, combined, chunks", "\n")[3]
    reduce = "reduce accum.* mean over 2 processes  # 1 bucket,"
    assert program(results, "machines", ";") == [
        "repeat 2 iterations",
        "run gradients(param.*, batch[i,2 lanes], accum.*) -> loss, output.*, accum.*, value.*",
        f"{reduce} 358912 bytes, while the next graph runs",
        "run gradients left(param.*, batch[i,2 lanes], accum.*, value.*) -> accum.*",
        f"{reduce} 724992 bytes, after all gradients",
        "run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, optstate.*",
        "emit loss, output.* final",
    ]
    assert "; 358912 bytes overlap; update divides" in program(results, "machines", "\n")[4]
    assert "nothing overlaps" in "".join(program(results, "exchanges over processes", "\n"))


def check_stages(results: Results, alone: Result, file) -> None:
    """Look at what only processes have that share stages."""
    for kind, common in {"PARAM": 0, "OPTSTATE": 8}.items():  # a count and a scale, on every chip
        kept = [own[SAVED]["kept"][kind] - common for own in results]
        assert sum(kept) == alone.kept[kind] - common
        assert 0 < min(kept) < max(kept) < sum(kept)
    for own in results:
        assert (
            "process 1 received a batch that differs from that of process 0"
            in own[SAVED]["refused"]
        )
    scales = [own[SAVED]["state"]["lossScaleUpdateFactor"] for own in results]
    assert scales[0] == scales[1] > 1
    model = CASES[SAVED].model(1).half()
    optimizer = CASES[SAVED].optimizer(model.parameters())
    loaded = poptorch.load(file, model=model, optimizer=optimizer)
    state = optimizer.state_dict()["ipu_state"]
    for ours, theirs in ((model.state_dict(), "weights"), (state, "state")):
        assert all(torch.equal(v, results[0][SAVED][theirs][key]) for key, v in ours.items())
    assert loaded.options.Distributed.stage_processes == 1
    loaded.destroy()


@pytest.mark.long
def test_a_job_that_was_killed_goes_on_from_the_checkpoint_of_all_stages(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    undisturbed = jobs.run("helpers.job_killed", [whole, 2], 2, whole)
    job_killed.plan(broken, {"victim": 1, "moment": "in a call", "times": 7})
    first = jobs.run("helpers.job_killed", [broken, 2], 2, broken)
    assert [code for code, _ in first.values()] == [1, -signal.SIGKILL]
    again = jobs.run("helpers.job_killed", [broken, 2], 2, broken)
    assert all("from step 6" in text for _, text in again.values())
    (weights,) = digests(text for _, text in undisturbed.values())
    assert digests(text for _, text in again.values()) == {weights}


@pytest.mark.parametrize("what, said", [
    ("killed", "it was killed, or its machine is lost"),
    ("raised", "it ended with ValueError: no more data"),
    ("changed alone", "another point of the program: it exchanges the numbers of the optimizer"),
    long("killed while compiling", ""), long("stopped", "no sign of life for 6 s"),
    long("killed between stages", "it was killed, or its machine is lost"),
    long("interrupted between stages", "this process was interrupted by KeyboardInterrupt"),
    long("state loaded alone", "point of the program: it exchanges the numbers of the optimizer"),
    long("weights written alone", "it exchanges digests of the weights that were written"),
])  # fmt: skip
def test_a_lost_process_is_named_by_the_others(what: str, said: str, tmp_path: Path) -> None:
    assert jobs.status(*jobs.start("helpers.job_fault", [what], 2, tmp_path)) == 1
    text = jobs.printed(tmp_path, 0)
    assert "poptorch.Error: 'poptorch_py_error': Process 1 of the job is lost" in text
    assert "process 1 of 2: " in text
    assert said in text


def test_processes_that_differ_stop_with_an_error_that_says_in_what(tmp_path: Path) -> None:
    for index, (code, text) in jobs.run("helpers.job_fault", ["differences"], 2, tmp_path).items():
        assert code == 0, text
        parts = re.split(f"(?:{'|'.join(DIFFERENCES)}): ", text)
        _, program, rate, length, weights, numbers, order, written, loaded = parts
        assert "do not train the same program" in program
        assert "process 1, against process 0" in program
        assert "operator" in program
        assert "hyper.0.lr: 0.5 here, 0.1 there" in rate
        assert "data for different numbers of calls" in length
        assert "process 0: 4; process 1: 2" in length
        assert "start with different weights" in weights
        assert "param.layer.weight: " in weights
        assert "hyper.0.lr: 0.3 here, 0.2 there" in numbers.replace("0.30000000000000004", "0.3")
        assert "shuffle the same data set with different seeds" in order
        assert "process 0: 3; process 1: 4" in order
        assert "have written different weights to their devices" in written
        assert "process 1, against process 0 ('there'): param.layer.weight: " in written
        assert "bias" not in written
        assert "___layer.weight: " in loaded
        assert "hyper." not in loaded
        assert "trained 3.0" in loaded
        assert ("process 0 of the job has another seed" in text) == (index == 1)


@pytest.mark.parametrize(
    "what, said",
    [
        long("another is killed", "process 1 of 3: no sign of life for 3 s"),
        (
            "it is killed",
            "process 0 of 3: it stored the messages of the processes, and the "
            "connection to it is closed",
        ),
        long(
            "it is stopped",
            "process 0 of 3: it stored the messages of the processes, and no sign of life for 3 s",
        ),
    ],
)
def test_who_is_lost_is_named_after_the_keeper_has_gone(
    what: str, said: str, tmp_path: Path
) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path, **jobs.NETWORK)
    assert jobs.status(*reversed(processes)) == 1, jobs.printed(tmp_path, 2)
    text = jobs.printed(tmp_path, 2)
    assert "of the job is lost" in text
    assert said in text
    assert "process 2 was waiting for it to exchange second texts" in text


@pytest.mark.parametrize("what", ["a member is killed", long("a member is stopped")])
def test_on_one_machine_who_is_lost_is_named_whoever_it_is(what: str, tmp_path: Path) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path)

    assert jobs.status(*reversed(processes)) == 1, jobs.printed(tmp_path, 2)
    text = jobs.printed(tmp_path, 2)
    assert "process 0 of 3: no sign of life for 3 s" in text
    assert "process 2 was waiting for it to exchange second texts" in text


@pytest.mark.parametrize("where", [{}, jobs.NETWORK])
def test_who_keeps_the_store_ends_after_the_others_have_read(where, tmp_path: Path) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path, **where)
    assert {text for _, text in ended.values()} == {"3 texts\n"}
    assert {status for status, _ in ended.values()} == {0}


def test_a_job_on_one_machine_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path)

    assert {status for status, _ in ended.values()} == {0}
    assert [*(tmp_path / "job").iterdir()] == []
