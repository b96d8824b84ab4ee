"""How programs end that use asynchronous loaders: cleanly, soon, and with nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import textwrap

import pytest

from helpers import programs
from helpers.leaks import descendants, still_there
from helpers.patience import HANGS, eventually

pytestmark = pytest.mark.slow
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

    def __init__(self, path, body):
        path.write_text(HEAD + textwrap.indent(textwrap.dedent(body), "    ") + TAIL)
        self.process = programs.Program(path, session=True, environment=ENVIRONMENT)
        assert self.process.stdout.readline() == "ready\n", self.process.errors()
        self.started = descendants(self.process.pid)
        assert len(self.started) >= 6

    def interrupt(self):
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self):
        """Return (exit code, stdout, stderr), when all its processes have gone."""
        out, err = self.process.communicate()
        gone = eventually(lambda: not still_there(self.started))
        assert gone, f"left behind: {still_there(self.started)}"
        self.process.close()
        return self.process.returncode, out, err


@pytest.mark.spec("data", 10)
def test_a_program_that_survives_ctrl_c_goes_on_loading_and_ends_with_the_next(tmp_path):
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
    assert (code, out, err.count("Traceback")) == (-signal.SIGINT, "", 1)
    assert err.rstrip().endswith("KeyboardInterrupt")


def test_processes_end_after_their_program_was_killed(tmp_path):
    program = Program(tmp_path / "p.py", 'print("ready", flush=True)\nsys.stdin.readline()')
    program.process.kill()
    code, *_ = program.end()
    assert code == -signal.SIGKILL


@pytest.mark.long
@pytest.mark.spec("data", 10)
def test_loaders_survive_the_server_that_has_started_them_and_may_be_abandoned(tmp_path):
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
    assert (code, err.count("Traceback"), err.splitlines()[-1]) == (1, 1, "ValueError: mine")
    assert out == "[[2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]\n[2.0, 3.0] [2.0, 3.0]\n"


def run(command):
    how = {"capture_output": True, "text": True, "timeout": HANGS, "check": False}
    return subprocess.run(command, env=ENVIRONMENT, **how)


UNGUARDED = """
from helpers.data_sets import Numbers
from poptorch import AsynchronousDataAccessor, SharingStrategy

AsynchronousDataAccessor(Numbers(1), sharing_strategy=SharingStrategy.SharedMemory)
"""


def test_a_script_without_a_guard_is_told_about_it(tmp_path):
    script = tmp_path / "p.py"
    script.write_text(UNGUARDED)
    done = programs.run(script, environment=ENVIRONMENT)
    assert done.returncode == 1
    message = done.stderr[done.stderr.index("poptorch.Error") :]
    assert "worker thread failed to start" in message
    assert "Got:    the loading process imports the script, which starts a loader again" in message
    first = message.split("Fix:")[1]
    assert first.strip() == 'put the code that trains under the guard: if __name__ == "__main__":'
    assert (done.stderr.count("Traceback"), len(message.splitlines())) == (1, 6)


def _can_mount():
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
def test_a_full_dev_shm(tmp_path):
    """The ring does not live there; what torch's workers send does, and their failure is told."""
    script = tmp_path / "p.py"
    script.write_text(SMALL_SHM)
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm"
    done = run(["unshare", "-rm", "sh", "-c", f"{mount} && exec {sys.executable} {script}"])
    assert (done.returncode, done.stdout) == (1, "[2, 2, 2]\n")
    assert "worker thread failed to start" in done.stderr
    assert "shared memory" in done.stderr
