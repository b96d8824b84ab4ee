"""Processes that share the stages of a model compute what one process does."""

from __future__ import annotations

import functools
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from helpers import job_stages, jobs
from helpers.cases import few, selected
from helpers.job_killed import digests
from helpers.job_stages import BLOCKS, CASES, SAVED, Result
from helpers.stage_zoo import Mlp

pytestmark = pytest.mark.slow
IN_TWO = [name for name in CASES if name != "two models"]
IN_FOUR = ["two models"]
FEW = ("grouped", "half, scaled automatically", "sharded")
Results = list[dict[str, dict[str, Any]]]


def job(folder: Path, processes: int, names: list[str]) -> Results:
    """Return by process what came of each case in one job."""
    ended = jobs.run("helpers.job_stages", [folder, *names], processes, folder)
    assert all(code == 0 for code, _ in ended.values()), ended
    return [torch.load(folder / f"{index}.pt") for index in ended]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the two processes write."""
    return tmp_path_factory.mktemp("two")


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest, folder: Path) -> Results:
    """The cases in two processes."""
    return job(folder, 2, sorted({*FEW, *selected(request, "two")}))


@pytest.fixture(scope="module")
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The cases in four."""
    return job(tmp_path_factory.mktemp("four"), 4, selected(request, "four"))


def close(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    tolerance = {torch.float16: 2e-3}.get(CASES[name].dtype, 1e-6)
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@functools.cache
def alone(name: str, processes: int, backend: str) -> Result:
    """Return what one process makes of a case that several share."""
    return job_stages.run(CASES[name], 0, processes, backend, alone=True)


def compare(results: Results, name: str) -> None:
    """Compare each process's results with those of one, stage by stage and fused."""
    shares = len(results) // CASES[name].parts if CASES[name].parts else 1
    for process, values in enumerate(results):
        own, share = Result(**values[name]), process * shares // len(results)
        # Fused, later stages draw other numbers.
        for backend in ["staged"] if name == "dropout" else ["staged", "reference"]:
            one = alone(name, shares, backend)
            assert own.weights.keys() == one.weights.keys()
            assert own.state.keys() == one.state.keys()
            for key, weight in own.weights.items():
                close(weight, one.weights[key], name)
            for key, state in own.state.items():
                close(state, one.state[key], name)
            for ours, theirs in zip(own.outputs, one.outputs, strict=True):
                close(ours, theirs if shares == 1 else theirs.chunk(shares)[share], name)
            for ours, theirs in zip(own.inferred, one.inferred, strict=True):
                close(ours, theirs, name)


@pytest.mark.parametrize("name", few(IN_TWO, *FEW))
def test_two_processes_share_the_stages(two: Results, name: str) -> None:
    compare(two, name)


@pytest.mark.parametrize("name", IN_FOUR)
def test_four_processes_share_the_stages(four: Results, name: str) -> None:
    compare(four, name)


def test_each_process_keeps_what_its_stages_need(two: Results) -> None:
    step = 4  # bytes of the count of updates, which every chip has
    half = (alone("grouped", 1, "staged").kept - step) // 2
    assert [own["grouped"]["kept"] for own in two] == [half + step] * 2


def test_other_batches_are_an_error_in_every_process(two: Results) -> None:
    for own in two:
        assert "were given different batches" in own["grouped"]["refused"]
        assert "process 1 not that of process 0" in own["grouped"]["refused"]


def test_collectives_in_forward_are_refused(four: Results) -> None:
    for own in four:
        assert "whose stages are on several processes cannot exchange" in own["refused"]["text"]


def test_the_loss_scale_moves_in_all_processes(two: Results) -> None:
    factors = [own["half, scaled automatically"]["state"]["lossScaleUpdateFactor"] for own in two]
    assert factors[0] == factors[1] > 1


def test_process_0_writes_one_file_that_one_process_can_read(two: Results, folder: Path) -> None:
    model, own = Mlp(BLOCKS), two[0][SAVED]
    optimizer = CASES[SAVED].optimizer(model.parameters())
    loaded = poptorch.load(folder / "saved.poptorch", model=model, optimizer=optimizer)
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, own["weights"][key])
    for key, state in optimizer.state_dict()["ipu_state"].items():
        assert torch.equal(state, own["state"][key])
    assert loaded.options.Distributed.stage_processes == 1
    loaded.destroy()


@pytest.mark.long
def test_a_job_that_was_killed_goes_on_from_the_checkpoint_of_all_stages(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    undisturbed = jobs.run("helpers.job_killed", [whole, 2], 2, whole)
    first = jobs.run("helpers.job_killed", [broken, 2, 7], 2, broken)
    assert [code for code, _ in first.values()] == [1, -signal.SIGKILL]
    again = jobs.run("helpers.job_killed", [broken, 2, 7], 2, broken)
    assert all("from step 6" in text for _, text in again.values())
    (weights,) = digests(text for _, text in undisturbed.values())
    assert digests(text for _, text in again.values()) == {weights}
