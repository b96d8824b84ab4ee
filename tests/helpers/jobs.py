"""Jobs of several processes for tests: scripts started together, as a launcher would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from helpers.patience import HANGS
from helpers.source_tree import PACKAGE, ROOT


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without a launcher's variables."""
    path = os.pathsep.join((str(PACKAGE.parent), str(ROOT / "tests")))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OMPI_", "PMIX_", "POPDIST_", "TORCHELASTIC_", "MASTER_"))
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def start(
    arguments: Sequence[object], count: int, folder: Path, **more: str
) -> list[subprocess.Popen[bytes]]:
    """Start Python with these arguments in so many processes, which are told who they are.

    What process i prints goes to the file ``i.out`` of the folder.
    """
    port = str(free_port())
    processes = []
    for index in range(count):
        place = {"RANK": str(index), "WORLD_SIZE": str(count)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"GLOO_SOCKET_IFNAME": "lo"}  # no other is looked for
        with (folder / f"{index}.out").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *map(str, arguments)],
                    cwd=folder,
                    env=environment(**place, **more),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            )
    return processes


def printed(folder: Path, index: int) -> str:
    """Return what a process of a job has printed."""
    return (folder / f"{index}.out").read_text()


def run(
    arguments: Sequence[object], count: int, folder: Path, **more: str
) -> Mapping[int, tuple[int, str]]:
    """Run a job to its end; return exit status and output of each process."""
    processes = start(arguments, count, folder, **more)
    try:
        codes = [process.wait(2 * HANGS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return {index: (code, printed(folder, index)) for index, code in enumerate(codes)}
