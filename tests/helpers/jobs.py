"""Jobs as a launcher would start them: forks of a process that has imported everything already."""

import atexit
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

from helpers import compiled
from helpers.patience import HANGS
from helpers.source_tree import PACKAGE, ROOT
from poptorch._cli import poprun


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    path = os.pathsep.join(map(str, (PACKAGE.parent, ROOT / "tests", ROOT / "benchmarks")))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "POPDIST_", "TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    }
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def fork(
    module: str, arguments: Sequence[Any], output: Path, variables: dict[str, str]
) -> BaseProcess:
    """A process calls a module's ``main``, prints to ``output`` and ends with what it returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["helpers.job_prepared"])
    texts = [str(argument) for argument in arguments]
    process = context.Process(target=_run, args=(module, texts, str(output), dict(variables)))
    # They are of the process that is forked, if that is yet to be started.
    with patch.dict(os.environ, environment(), clear=True):
        process.start()
    return process


def _run(module: str, arguments: list[str], output: str, variables: dict[str, str]) -> None:
    """Be a process like any other: its own output, hooks of exceptions and of the end included."""
    with open(output, "wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(Path(output).parent)
    status = 1
    try:
        status = int(importlib.import_module(module).main(*arguments) or 0)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    try:
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


# A name of this machine that might be that of another one: processes meet over the network.
NETWORK = {"MASTER_ADDR": "127.0.0.2"}


def start(
    module: str, arguments: Sequence[Any], count: int, folder: Path, **more: Any
) -> list[BaseProcess]:
    """Start processes that know their index; process i prints to ``i.out`` of the folder."""
    port, processes = str(free_port()), []
    for index in range(count):
        place = {"RANK": str(index), "WORLD_SIZE": str(count)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"GLOO_SOCKET_IFNAME": "lo"}  # no other is looked for
        place |= {"POPTORCH_JOB_DIR": str(folder / "job")}  # which goes with the test
        variables = environment(**place | more)
        processes.append(fork(module, arguments, folder / f"{index}.out", variables))
    return processes


def status(process: BaseProcess, *others: BaseProcess, seconds: float = 2 * HANGS) -> int:
    """Wait for a process, end all; return its status, negative for a signal; or TimeoutError."""
    try:
        process.join(seconds)
        if process.exitcode is None:
            raise TimeoutError(f"process {process.pid} has not ended")
        return process.exitcode
    finally:
        end((process, *others))


def end(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join()


def printed(folder: Path, index: int) -> str:
    text = (folder / f"{index}.out").read_text()
    compiled.note_failures_in(text)
    return text


def run(
    module: str, arguments: Sequence[Any], count: int, folder: Path, **more: Any
) -> dict[int, tuple[int, str]]:
    """Run a job to its end; return exit status and output of each process."""
    processes = start(module, arguments, count, folder, **more)
    try:
        codes = [status(process) for process in processes]
    finally:
        end(processes)
    return {index: (code, printed(folder, index)) for index, code in enumerate(codes)}


def main(*arguments: str) -> int:
    """Run a job by ``poprun``, in a process that has been forked for it; return its status."""
    return poprun.main(["--oversubscribe", *arguments])  # on one core, too
