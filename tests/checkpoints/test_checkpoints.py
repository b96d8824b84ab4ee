"""Checkpoints: a run that was stopped goes on as if it had not been."""

import copy
import errno
import json
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils import data

import poptorch
from harden import checkpoint_kills
from helpers import cases, jobs, resuming
from helpers.patience import HANGS
from helpers.resuming import SAVED_AT, Run, whole_and_resumed
from helpers.wrapping import Having, normal, options, training
from poptorch._base import archive
from poptorch._checkpoints import host_random
from poptorch._checkpoints.checkpoints import _Writing


@pytest.mark.slow
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path) -> None:
    losses, resumed = whole_and_resumed(tmp_path)
    assert len(losses) == 6
    assert resumed == losses


@pytest.mark.larger("test_a_resumed_run_has_the_losses_of_an_uninterrupted_one")
def test_processes_resume_together_and_one_continues_alone(tmp_path: Path) -> None:
    ended = jobs.run("helpers.resuming", [tmp_path], 2, tmp_path)
    assert all(code == 0 for code, _ in ended.values()), ended
    for process in ended:
        losses, resumed = torch.load(tmp_path / f"{process}.pt")
        assert len(losses) == 6
        assert resumed == losses
    alone = Run(tmp_path / "run", 1)
    assert alone.checkpoints.resume()
    assert alone.checkpoints.step == SAVED_AT
    assert len(alone.go_on()) == 2


def plain() -> nn.Module:
    return Having(lambda m, x: poptorch.identity_loss(m.layer(x), "sum"), layer=nn.Linear(2, 1))


def make(
    folder: Path, calls: int = 0, loader: poptorch.DataLoader | None = None, **stateful: object
) -> poptorch.Checkpoints:
    executor, loader = training(plain()), loader or [torch.ones(1, 2)] * 9
    checkpoints = poptorch.Checkpoints(folder, executor, loader, **stateful)
    for _, batch in zip(range(calls), checkpoints.batches(1), strict=False):
        executor(batch)
    return checkpoints


def test_the_latest_checkpoints_are_kept_and_unfinished_ones_do_not_count(tmp_path: Path) -> None:
    checkpoints, left = make(tmp_path), tmp_path / "unfinished-000000008"
    for step, batch in enumerate(checkpoints.batches(1), 1):
        checkpoints._executor(batch)
        if step in (3, 5, 7):
            assert checkpoints.save().name == f"00000000{step}"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000005", "000000007"]
    shutil.copytree(tmp_path / "000000005", left)  # as of a process that was killed
    resumed = make(tmp_path)
    assert resumed.resume() is True
    assert resumed.step == 7
    (batch,) = (batch for _, batch in zip(range(1), resumed.batches(1), strict=False))
    resumed._executor(batch)
    resumed.save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000007", "000000008"]


def test_a_loop_that_was_left_early_continues_before_and_after_resuming(tmp_path: Path) -> None:
    def made() -> poptorch.Checkpoints:
        opts, rows = options().randomSeed(1), torch.arange(18.0).view(9, 2)
        return make(tmp_path, 0, poptorch.DataLoader(opts, rows, shuffle=True))

    def take(checkpoints: poptorch.Checkpoints, count: int) -> list[float]:
        batches = zip(range(count), checkpoints.batches(2), strict=False)
        return [float(batch[0, 0]) + 0 * checkpoints._executor(batch) for _, batch in batches]

    first = made()
    for _ in first._loader:  # somebody looks at a batch
        break
    seen = take(first, 3) + take(first, 2)
    first.save()
    resumed = made()
    assert resumed.resume()
    seen += take(resumed, 4)
    assert sorted(seen) == [2.0 * row for row in range(9)]


@pytest.mark.parametrize(
    "rows, others, same",
    [
        (22, {}, True),
        (16, {"drop_last": False}, True),
        (18, {"drop_last": False}, False),
        (16, {"auto_distributed_partitioning": False}, False),
    ],
)
def test_fewer_processes_read_the_batches_of_all_or_raise_an_error(
    rows: int, others: dict[str, bool], same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = torch.ones(rows, 2)
    make(tmp_path, 1, poptorch.DataLoader(options(), data, 4, **others)).save()
    monkeypatch.setenv("POPDIST_PROCESSES_EACH", "2")
    with nullcontext() if same else pytest.raises(poptorch.Error, match="with different batches"):
        assert make(tmp_path, 0, poptorch.DataLoader(options(), data, 2, **others)).resume()


def weight_of(checkpoints: poptorch.Checkpoints) -> torch.Tensor:
    return checkpoints._executor.state_dict()["layer.weight"].clone()


def test_a_run_continues_while_its_checkpoint_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make(tmp_path, 2)
    saved, gate, write = weight_of(checkpoints), threading.Event(), archive.write
    monkeypatch.setattr(archive, "write", lambda *args: gate.wait(HANGS) and write(*args))
    folder = checkpoints.save(wait=False)
    checkpoints._executor(torch.ones(1, 2))
    assert not folder.exists()
    assert not torch.equal(weight_of(checkpoints), saved)
    gate.set()
    checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == [folder.name] == ["000000002"]
    resumed = make(tmp_path)
    assert resumed.resume()
    assert torch.equal(weight_of(resumed), saved)


def test_the_end_of_a_process_waits_for_its_last_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[bool] = []
    own = {tmp_path / "own": {"a": b"1"}}
    writing = _Writing(own, [], lambda: ended.append(True), lambda: None, HANGS)
    writing._leave()
    assert ended
    writing.wait()
    of_others = [tmp_path / "of others"]
    others = _Writing({}, of_others, lambda: ended.append(True), lambda: None, 0.01)
    others._leave()  # they have been killed
    others.wait()
    assert len(ended) == 1
    assert "The last checkpoint is incomplete: files of other processes are missing" in caplog.text


@pytest.mark.parametrize("waits", [True, False])
def test_a_checkpoint_that_cannot_be_written_is_an_error_and_leaves_nothing(
    waits: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = make(tmp_path)
    batches = checkpoints.batches(1)
    checkpoints._executor(next(batches))
    checkpoints.save()

    def full(path: Path, parts: object) -> None:
        path.write_bytes(b"some")
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints._executor(next(batches))
    with monkeypatch.context() as patch:
        patch.setattr(archive, "write", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(wait=waits)
            checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["000000001"]
    checkpoints._executor(next(batches))
    assert checkpoints.save(wait=waits).name == "000000003"
    checkpoints.wait()
    resumed = make(tmp_path)
    assert resumed.resume() is True
    assert resumed.step == 3


def test_state_that_cannot_be_stored_leaves_no_part_of_a_checkpoint(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, 1, counter=Counter(object()))
    with pytest.raises(poptorch.Error, match="state of counter cannot be saved"):
        checkpoints.save()
    assert list(tmp_path.iterdir()) == []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def advanced(checkpoints: poptorch.Checkpoints, step: int) -> Path:
    """Save as at a later step."""
    checkpoints.step = step
    return checkpoints.save()


def older_run(folder: Path, *steps: int) -> None:
    checkpoints = make(folder, 1)
    for step in steps:
        advanced(checkpoints, step)


def test_a_new_run_keeps_its_checkpoints_and_those_of_an_older_run_with_more_steps(
    tmp_path: Path,
) -> None:
    older_run(tmp_path, 40, 50)
    checkpoints = make(tmp_path, 1)
    saved = [advanced(checkpoints, step) for step in (5, 10, 15)]
    assert [path.exists() for path in saved] == [False, True, True]
    assert names(tmp_path) == ["000000010", "000000015", "000000040", "000000050"]


def test_resuming_takes_the_checkpoint_saved_last_not_the_one_with_most_steps(
    tmp_path: Path,
) -> None:
    older_run(tmp_path, 40, 50)
    advanced(make(tmp_path, 1), 5)
    resumed = make(tmp_path)
    assert resumed.resume()
    assert resumed.step == 5


def test_an_older_run_with_more_steps_is_one_warning_with_both_remedies(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older_run(tmp_path, 40, 50)
    checkpoints = make(tmp_path, 1)
    advanced(checkpoints, 5)
    advanced(checkpoints, 10)
    (message,) = [record.getMessage() for record in caplog.records if "another run" in record.msg]
    assert "more steps: 40, 50" in message
    assert "call resume() before the first call" in message
    assert "poptorch.Checkpoints('other', ...)" in message


def test_an_older_run_is_removed_when_a_run_has_passed_it(tmp_path: Path) -> None:
    older_run(tmp_path, 40, 50)
    checkpoints = make(tmp_path, 1)
    advanced(checkpoints, 45)
    advanced(checkpoints, 55)
    assert names(tmp_path) == ["000000045", "000000055"]


@pytest.mark.parametrize("keep", [1, 2])
def test_saving_again_at_a_step_replaces_its_checkpoint(keep: int, tmp_path: Path) -> None:
    counter = Counter([1.0])
    checkpoints = make(tmp_path, 1, keep=keep, counter=counter)
    checkpoints.save()
    counter.state = [2.0]
    checkpoints.save()
    assert names(tmp_path) == ["000000001"]
    resumed = Counter([0.0])
    assert make(tmp_path, counter=resumed).resume()
    assert resumed.state == [2.0]


def test_a_save_at_the_same_step_that_fails_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter([1.0])
    checkpoints = make(tmp_path, 1, counter=counter)
    checkpoints.save()
    counter.state = [2.0]
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name.startswith("unfinished-"):
            raise OSError(errno.EIO, "Input/output error")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="Input/output"):
            checkpoints.save()
    assert names(tmp_path) == ["000000001"]
    resumed = Counter([0.0])
    assert make(tmp_path, counter=resumed).resume()
    assert resumed.state == [1.0]


@pytest.mark.larger("test_a_save_at_the_same_step_that_fails_leaves_the_older_checkpoint")
@pytest.mark.parametrize(
    "step, older", [(5, False), (6, True), cases.long(5, True), cases.long(6, False)]
)
def test_a_kill_before_any_file_operation_of_a_save_leaves_the_newest_checkpoint(
    step: int, older: bool, tmp_path: Path
) -> None:
    """The checkpoint of step 5 is complete; it is saved once more, or the one after it."""
    operation, killed = 0, True
    while killed:
        folder = tmp_path / str(operation)
        if older:
            checkpoint_kills.with_older_run(folder)
        assert [*checkpoint_kills.saving(folder, 1, iter([5]))] == [1]

        def save_again(folder: Path = folder) -> None:
            checkpoints, number = checkpoint_kills.made(folder, 1)
            checkpoints.resume()
            checkpoints._executor.compile(torch.ones(1, 2))
            number.number, checkpoints.step = 2, step
            checkpoints.save()

        killed = checkpoint_kills.killed_before(folder, operation, save_again)
        assert checkpoint_kills.problem_of(folder, 1, 1 if killed else 2) is None
        operation += 1
    assert operation > 8


class Counter:
    def __init__(self, state: object) -> None:
        self.state = state

    def state_dict(self) -> dict[str, object]:
        return {"state": self.state}

    def load_state_dict(self, state: dict[str, object]) -> None:
        if not isinstance(state["state"], list):
            raise RuntimeError("no list")
        self.state = state["state"]


def test_objects_that_cannot_be_saved_or_resumed_are_refused(tmp_path: Path) -> None:
    for state in (object(), [{"average": torch.ones(2)}]):
        with pytest.raises(poptorch.Error, match="state of counter cannot be saved"):
            make(tmp_path, 1, counter=Counter(state)).save()
    first = make(tmp_path)
    assert not first.resume()
    first._executor.compile(torch.ones(1, 2))
    first.save()  # before the first batch
    resumed = make(tmp_path)
    assert resumed.resume()
    assert len(list(resumed.batches(1))) == 9
    made = make(tmp_path, 1, counter=Counter([1.5]))
    made.save()
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        made.resume()
    with pytest.raises(poptorch.Error, match="counter exists only in the checkpoint"):
        make(tmp_path).resume()
    counter = Counter([0.0])
    assert make(tmp_path, counter=counter).resume()
    assert counter.state == [1.5]
    file = tmp_path / "000000001" / "process-0"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(AssertionError, match="Invalid file"):
        make(tmp_path, counter=counter).resume()


@pytest.mark.slow
def test_unusable_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wrapped for training"):
        poptorch.Checkpoints(tmp_path, poptorch.inferenceModel(plain()), [])
    executor = make(tmp_path)._executor
    with pytest.raises(AssertionError, match="At least one"):
        poptorch.Checkpoints(tmp_path, executor, [], keep=0)


IN_ANOTHER_PROCESS = {
    "shuffled": {"shuffle": True},
    "a subset": {"sampler": data.SubsetRandomSampler(range(14))},
    "in batches": {"batch_sampler": data.BatchSampler(data.RandomSampler(range(14)), 2, True)},
}


@pytest.mark.slow
@pytest.mark.parametrize("order", IN_ANOTHER_PROCESS)
def test_an_order_that_is_drawn_in_another_process_is_refused(order: str, tmp_path: Path) -> None:
    given = IN_ANOTHER_PROCESS[order]
    asynchronous = poptorch.DataLoaderMode.Async
    loader = poptorch.DataLoader(options(), resuming.Noisy(), mode=asynchronous, **given)
    try:
        with pytest.raises(AssertionError, match="shuffles in another process"):
            poptorch.Checkpoints(tmp_path, make(tmp_path)._executor, loader)
    finally:
        loader.terminate()


def manipulated(folder: Path, **facts: object) -> None:
    """Change what a process has written, with right digests."""
    file = folder / "process-0"
    known = json.loads(archive.read(file)["facts.json"])
    archive.write(file, {"facts.json": json.dumps({**known, **facts}).encode()})


MANIPULATIONS = {
    "no list": {"stateful": {"counter": {"dict": [["state", 5]]}}},
    "a method": {"stateful": {"counter": {"dict": [["state", []], ["load_state_dict", 1]]}}},
    "no form": {"stateful": {"counter": {"module": "os"}}},
    "a number that is none": {"taken": "1"},
    "a number without an end": {"epoch": 1 << 80},
    "no processes": {"processes": None},
    "a random state that is none": {"device": [1, 2]},
    "generators that are none": {"host": {"torch": [1], "python": [3, [1], None]}},
    "Python's generator": {"begun": {**host_random.state(), "python": [3, [0] * 625, "x"]}},
}


@pytest.mark.parametrize("manipulation", MANIPULATIONS)
def test_manipulated_checkpoints_are_refused_and_change_nothing(
    manipulation: str, tmp_path: Path
) -> None:
    manipulated(make(tmp_path, 1, counter=Counter([1.5])).save(), **MANIPULATIONS[manipulation])
    counter = Counter([0.0])
    resuming_ = make(tmp_path, counter=counter)
    model = resuming_._executor._user_model
    torch.nn.init.constant_(model.layer.weight, 7.0)
    with pytest.raises(poptorch.Error):
        resuming_.resume()
    assert (model.layer.weight == 7).all()
    assert counter.state == [0.0]
    assert resuming_.step == 0
    assert resuming_._executor._session.restored is None


def test_links_among_checkpoints_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("000000000", "unfinished-000000009"):
        (folder / name).symlink_to(tmp_path / "mine")
    for name in ("7", "٣"):  # no names of ours
        (folder / name).mkdir()
    checkpoints = make(folder)
    for step, batch in enumerate(checkpoints.batches(1), 1):
        checkpoints._executor(batch)
        if step < 4:
            checkpoints.save()
    assert {path.name for path in folder.iterdir()} == {"000000002", "000000003", "7", "٣"}
    assert (tmp_path / "mine" / "file").read_text() == "mine"


@pytest.mark.larger("test_a_resumed_run_has_the_losses_of_an_uninterrupted_one")
@pytest.mark.parametrize("stopped", [3, 6, 7])
def test_a_run_resumes_at_the_short_last_batch_of_an_epoch(stopped: int, tmp_path: Path) -> None:
    """The 19 samples after two whole batches are 2 micro-batches of 8 and one of 3."""
    chosen = options(accumulation=4)
    samples = data.TensorDataset(normal(83, 4), normal(83, 4, seed=1))

    def run(folder: Path, end: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = Having(lambda m, x, y: nn.functional.mse_loss(m.layer(x), y), layer=nn.Linear(4, 4))
        training = poptorch.trainingModel(model, chosen, poptorch.optim.Adam(model.parameters()))
        loader = poptorch.DataLoader(chosen, samples, batch_size=8, drop_last=False)
        checkpoints = poptorch.Checkpoints(folder, training, loader)
        checkpoints.resume()
        for batch in checkpoints.batches(epochs=3):
            training(*batch)
            if checkpoints.step == end:
                checkpoints.save()
                break
        weights = copy.deepcopy(model.state_dict())
        training.destroy()
        return weights

    whole = run(tmp_path / "whole", 9)
    run(tmp_path / "parts", stopped - 1)
    run(tmp_path / "parts", stopped)

    torch.testing.assert_close(run(tmp_path / "parts", 9), whole, rtol=0, atol=0)
