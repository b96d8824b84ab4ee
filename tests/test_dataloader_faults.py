"""What goes wrong while data is loaded, and how programs end: nothing hangs or stays behind."""

import contextlib
import gc
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import worker as torch_worker

from helpers import data_sets as sets
from helpers import programs
from helpers.cases import few
from helpers.leaks import (
    descendants,
    end_kept_compiler,
    nothing_left,
    segments,
    still_there,
)
from helpers.loaders import ALL_MODES, ASYNC_MODES, loader, values
from helpers.patience import HANGS, eventually
from poptorch._base.errors import Error
from poptorch._data import loading_process
from poptorch.dataloader import AsynchronousDataAccessor
from poptorch.enums import DataLoaderMode, SharingStrategy

pytestmark = pytest.mark.slow
FORK, FORK_SERVER = SharingStrategy.Fork, SharingStrategy.ForkServer


@pytest.fixture(scope="module", autouse=True)
def _processes_started_before() -> None:
    """Start Python's own helper processes, which stay until the program ends, and end the process
    that earlier tests left for compiling the next program: it would be counted.
    """
    end_kept_compiler()
    resource_tracker.ensure_running()
    accessor(sets.Numbers(1), FORK_SERVER).terminate()


def accessor(
    dataset: Any, strategy: SharingStrategy = FORK, **kwargs: Any
) -> AsynchronousDataAccessor:
    return AsynchronousDataAccessor(dataset, sharing_strategy=strategy, **kwargs)


def worker_pid(made: AsynchronousDataAccessor | torch_dataloader.DataLoader) -> int:
    (pid,) = (pid for pid in descendants() if os.getpgid(pid) == pid)
    return pid


def limit_file_size(index: int) -> None:
    """Limit the size of files, so that there is no space for the ring of buffers."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


NOT_STARTED = {  # with the strategy that is tried
    "an error in the first element": (
        sets.Acting(4, 0, sets.cannot_be_read),
        FORK_SERVER,
        ["sample 0 cannot be read", "data_sets.py"],
    ),
    "nothing": (sets.Numbers(0), FORK, ["The Dataset is empty"]),
    "no pickle": (sets.Unpicklable(3), FORK_SERVER, ["this data set cannot travel"]),
    "no way back": (sets.Unreadable(3), FORK_SERVER, ["this data set cannot arrive"]),
    "a death": (sets.Acting(3, 0, sets.kills_its_process), FORK, ["was killed by SIGKILL"]),
    "no memory": (sets.Acting(3, 0, limit_file_size), FORK, ["OSError", "File too large"]),
}


@pytest.mark.spec("data", 9)
@pytest.mark.parametrize("name", NOT_STARTED)
def test_errors_of_the_start_are_raised_in_the_constructor(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset, strategy, texts = NOT_STARTED[name]
    with nothing_left(), pytest.raises(Error, match="worker thread failed to start") as caught:
        accessor(dataset, strategy)
    for text in texts:
        assert text in str(caught.value)
    if name == "an error in the first element":
        assert texts[0] in caplog.text


@pytest.mark.parametrize("mode, workers", [(ASYNC_MODES[0], 0), (ASYNC_MODES[1], 2)])
def test_a_later_error_arrives_in_its_place_and_the_loader_can_be_used_again(
    mode: DataLoaderMode, workers: int
) -> None:
    data = sets.Acting(12, 7, sets.cannot_be_read)
    with nothing_left():
        made = loader(data, 2, mode=mode, num_workers=workers)
        pid, iterator = worker_pid(made), iter(made)
        assert values(next(iterator) for _ in range(3)) == [[0, 1], [2, 3], [4, 5]]
        for _ in range(2):
            with pytest.raises(AssertionError, match="occurred in the data fetcher") as caught:
                next(iterator)
            assert "sample 7 cannot be read" in str(caught.value)
            assert "data_sets.py" in str(caught.value)
        with pytest.raises(AssertionError, match="sample 7"):
            list(made)
        data.acts.zero_()
        assert [x for b in values(made) for x in b] == list(range(12))
        assert worker_pid(made) == pid
        del made, iterator, caught  # which ends the process at once


@pytest.mark.parametrize("strategy", few([FORK, FORK_SERVER], FORK))
def test_a_killed_process_is_noticed_after_the_loaded_data(strategy: SharingStrategy) -> None:
    data = sets.Counted(9)
    with nothing_left() as known:
        made = accessor(data, strategy, buffer_size=2, early_preload=True)
        known.update(descendants())
        assert eventually(lambda: data.count >= 2)  # the first is in the ring
        os.kill(worker_pid(made), signal.SIGKILL)
        with pytest.raises(AssertionError, match="error occurred in the data fetcher") as caught:
            for expected in range(3):
                assert next(made) == expected
        assert expected >= 1
        assert "was killed by SIGKILL" in str(caught.value)
        with pytest.raises(AssertionError, match="data fetcher"):
            iter(made)
        made.terminate()
        del caught


def leave_a_segment(worker: int) -> None:
    """Leave a named memory segment, like a worker that is killed before it removes the name."""
    torch_worker.MP_STATUS_CHECK_INTERVAL = 1e6  # it does not look whether its parent is there
    if not Path("/dev/shm").is_dir():
        return
    Path(f"/dev/shm/torch_{os.getpid()}_{worker}_{os.getppid()}").touch()  # found by the parent


LEAVING = {"mode": DataLoaderMode.Async, "num_workers": 2, "worker_init_fn": leave_a_segment}


def test_a_killed_process_does_not_leave_its_workers() -> None:
    with nothing_left() as known:
        made = loader(sets.Numbers(100), 2, **LEAVING)
        iterator = iter(made)
        for _ in range(2):  # one of each worker
            next(iterator)
        known.update(descendants())
        assert len(known) == 3
        os.kill(worker_pid(made), signal.SIGKILL)
        with pytest.raises(AssertionError, match="was killed by SIGKILL"):
            list(iterator)
        del made, iterator


def test_a_killed_worker_of_torch_ends_the_iteration_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # Asynchronously only: in the program itself, torch raises from a signal handler, anywhere.
    look = torch_dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (0.1,))  # torch looks every 5 s
    data = sets.Acting(8, 5, sets.kills_its_process)
    with nothing_left():
        made = loader(data, 1, mode=DataLoaderMode.Async, num_workers=1)
        with pytest.raises(AssertionError, match="occurred in the data fetcher"):
            list(made)
        data.acts.zero_()
        assert values(made) == [[i] for i in range(8)]
        del made


def test_a_loader_that_has_failed_ends_its_process_when_it_goes() -> None:
    gc.disable()
    made = accessor(sets.Acting(4, 2, sets.cannot_be_read))
    for _ in range(2):
        with contextlib.suppress(AssertionError):
            list(made)
    assert len(descendants()) == 1
    del made
    assert descendants() == {}


@pytest.mark.parametrize("number, workers", [(signal.SIGINT, 0), (signal.SIGTERM, 2)])
def test_a_terminated_process_ends_together_with_its_workers(
    number: signal.Signals, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with nothing_left() as known:
        made = loader(sets.Slow(100, 5), 1, mode=DataLoaderMode.Async, num_workers=workers)
        iterator = iter(made)
        next(iterator)
        known.update(descendants())
        assert len(known) == 1 + workers
        os.kill(worker_pid(made), number)
        with pytest.raises(AssertionError, match="data fetcher"):
            list(iterator)
        del made, iterator
    if not workers:  # Python may report that the receiver of a shared file has gone
        assert capfd.readouterr() == ("", "")


def test_a_process_that_does_not_stop_is_killed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading_process, "PATIENCE", 0.2)
    sleeps = torch.zeros(1, dtype=torch.bool).share_memory_()

    def sleep(index: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sleeps.fill_(True)
        time.sleep(1000)

    data = sets.Acting(3, 1, sleep)
    with nothing_left():
        made = accessor(data, early_preload=True)
        assert eventually(lambda: sleeps)
        made.terminate()
    assert "is interrupted" in caplog.text


@pytest.mark.long
def test_a_stopped_process_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading_process, "PATIENCE", 0.2)
    with nothing_left():
        made = accessor(sets.Numbers(3))
        os.kill(worker_pid(made), signal.SIGSTOP)
        made.terminate()


@pytest.mark.spec("data", 10)
@pytest.mark.parametrize("mode, workers", [*zip(ALL_MODES, (2, 0, 2), strict=True)])
def test_a_consumer_that_stops_early_leaves_nothing_behind(
    mode: DataLoaderMode, workers: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with nothing_left() as known:
        made = loader(sets.Numbers(100), 1, mode=mode, num_workers=workers)
        for batch in made:
            if batch.item() == 3:
                break
        known.update(descendants())
        del made, batch
    assert capfd.readouterr() == ("", "")


def test_an_interrupted_constructor_leaves_nothing_and_a_consumer_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch, nothing_left(), pytest.raises(KeyboardInterrupt):
        patch.setattr(
            "poptorch._data.consumer.Consumer._message", lambda *_: signal.raise_signal(2)
        )
        accessor(sets.Slow(3, 100))
    made = accessor(sets.Numbers(4), buffer_size=2)
    for interrupted, left in ((next, [[1], [2], [3]]), (iter, [[0], [1], [2], [3]])):
        iter(made)
        assert next(made) == 0
        with monkeypatch.context() as patch:
            patch.setattr(made._consumer, "_message", lambda *_: signal.raise_signal(2))
            with pytest.raises(KeyboardInterrupt):
                interrupted(made)
        if interrupted is iter:
            iter(made)
        assert values(iter(lambda: next(made, None), None)) == left


def test_large_data_sets_are_sent_to_the_workers_through_one_file() -> None:
    with nothing_left():
        made = accessor(sets.Unwieldy(), FORK_SERVER)
        assert values(made) == [[1999.0]]
        made.terminate()
        del made


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="this system has no /dev/shm")
@pytest.mark.parametrize("whole", few([False, True], False))
def test_shared_memory_that_workers_left_is_removed(whole: bool) -> None:
    with nothing_left() as known:
        made, left = loader(sets.Numbers(12), 1, persistent_workers=False, **LEAVING), set()
        for _ in range(2 if whole else 1):  # a new iteration has new workers
            for batch in made:
                known.update(descendants())
                left |= segments(set(known))
                if not whole and batch.item() == 3:
                    break
        assert left
        del made, batch


ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
HEAD = """
import os, signal, sys, time
from helpers.data_sets import Numbers, Slow
from helpers.loaders import loader
from poptorch.enums import DataLoaderMode, SharingStrategy

def iterate(strategy, workers, milliseconds=2):
    made = loader(
        Slow(100, milliseconds), 2, mode=DataLoaderMode.Async, num_workers=workers,
        async_options={"sharing_strategy": strategy},
    )
    iterator = iter(made)
    next(iterator)
    return iterator

def main():
    by_fork = iterate(SharingStrategy.Fork, 2)
    by_server = iterate(SharingStrategy.ForkServer, 2)
"""
TAIL = """
if __name__ == "__main__":
    main()
"""


class Program:
    """A script that runs in a session of its own, with the processes that it has started."""

    def __init__(self, path: Path, body: str) -> None:
        path.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    ") + TAIL)
        self.process = programs.Program(path, session=True, environment=ENVIRONMENT)
        assert self.process.stdout.readline() == "ready\n", self.process.errors()
        self.started = descendants(self.process.pid)
        assert len(self.started) >= 6

    def interrupt(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str, str]:
        """Return (exit code, stdout, stderr), when all its processes have gone."""
        out, err = self.process.communicate()
        gone = eventually(lambda: not still_there(self.started))
        assert gone, f"left behind: {still_there(self.started)}"
        self.process.close()
        return self.process.returncode, out, err


@pytest.mark.spec("data", 10)
def test_a_program_that_survives_ctrl_c_continues_to_load_and_ends_with_the_next_one(
    tmp_path: Path,
) -> None:
    body = """
        try:
            print("ready", flush=True)
            sys.stdin.readline()
        except KeyboardInterrupt:
            print(sum(1 for _ in by_fork), flush=True)
        for element in zip(by_fork._owner, by_server):
            print("going on", flush=True)
            time.sleep(60)
    """
    program = Program(tmp_path / "p.py", body)
    program.interrupt()
    assert program.process.stdout.readline() == "49\n"
    assert program.process.stdout.readline() == "going on\n"
    program.interrupt()
    code, out, err = program.end()
    assert code == -signal.SIGINT
    assert out == ""
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_processes_end_after_their_program_was_killed(tmp_path: Path) -> None:
    program = Program(tmp_path / "p.py", 'print("ready", flush=True)\nsys.stdin.readline()')
    program.process.kill()
    code, *_ = program.end()
    assert code == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.spec("data", 10)
def test_loaders_survive_the_server_that_has_started_them_and_may_be_abandoned(
    tmp_path: Path,
) -> None:
    """The program ends silently, by the error of its own at most."""
    body = """
        from multiprocessing import forkserver
        print("ready", flush=True)
        slow = iterate(SharingStrategy.ForkServer, 0, milliseconds=150)
        os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
        print([next(slow).tolist() for _ in range(3)])  # waits; and looks for the process
        by_new_server = iterate(SharingStrategy.ForkServer, 2)
        print(next(by_server).tolist(), next(by_new_server).tolist())
        for element in by_fork:
            raise ValueError("mine")
    """
    code, out, err = Program(tmp_path / "p.py", body).end()
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.splitlines()[-1] == "ValueError: mine"
    assert out == "[[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]\n[2.0, 3.0] [2.0, 3.0]\n"


def run(command: Any) -> Any:
    how = {"capture_output": True, "text": True, "timeout": HANGS, "check": False}
    return subprocess.run(command, env=ENVIRONMENT, **how)


UNGUARDED = """
from helpers.data_sets import Numbers
from poptorch import AsynchronousDataAccessor, SharingStrategy

AsynchronousDataAccessor(Numbers(1), sharing_strategy=SharingStrategy.SharedMemory)
"""


def test_a_script_without_a_main_guard_gets_an_error_about_it(tmp_path: Path) -> None:
    script = tmp_path / "p.py"
    script.write_text(UNGUARDED)
    done = programs.run(script, environment=ENVIRONMENT)
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("poptorch.Error") :]
    assert "worker thread failed to start" in message
    assert "Got:    the loading process imports the script, which starts a loader again" in message
    first = message.split("Fix:")[1]
    assert first.strip() == 'put the training code under the guard: if __name__ == "__main__":'
    assert done.stderr.count("Traceback") == 1
    assert len(message.splitlines()) == 6


def _can_mount() -> Any:
    if shutil.which("unshare") is None:
        return False
    return run(["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]).returncode == 0


SMALL_SHM = """
from helpers.data_sets import Numbers
from helpers.loaders import loader
from poptorch.enums import DataLoaderMode

if __name__ == "__main__":
    for workers in (0, 1):
        made = loader(Numbers(6, (100_000,)), 2, mode=DataLoaderMode.Async, num_workers=workers)
        print([batch.shape[0] for batch in made], flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not _can_mount(), reason="needs a private /dev/shm of 64 kB")
def test_a_full_dev_shm_is_an_error_that_names_shared_memory(tmp_path: Path) -> None:
    """The ring is not in /dev/shm, but tensors from torch's workers are; the error reports this."""
    script = tmp_path / "p.py"
    script.write_text(SMALL_SHM)
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    done = run(["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script}"])
    assert done.returncode == 1
    assert done.stdout == "[2, 2, 2]\n"
    assert "worker thread failed to start" in done.stderr
    assert "shared memory" in done.stderr
