"""Jobs of plain scripts: what listens while they run, and how their processes end."""

import contextlib
import ipaddress
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from helpers import jobs
from helpers.cases import long
from helpers.patience import HANGS, eventually

pytestmark = pytest.mark.slow
SCRIPT = [sys.executable, "-m", "helpers.job_ending"]
LAUNCHERS = {
    "poprun": ["poptorch._cli.poprun", "--num-instances=2", "--oversubscribe"],
    "torchrun": ["torch.distributed.run", "--nproc-per-node=2"],
}


@contextlib.contextmanager
def started(command: list[str], output: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    with output.open("wb") as file:
        settings = jobs.environment(TMPDIR=str(output.parent), **more)
        process = subprocess.Popen(command, stdout=file, stderr=file, env=settings)
    try:
        yield process
    finally:
        if process.poll() is None:
            for each in [*psutil.Process(process.pid).children(recursive=True), process]:
                each.kill()
            process.wait()


def of_launcher(name: str, *arguments: str) -> list[str]:
    words = ["-m", *SCRIPT[2:]] if name == "torchrun" else ["--", *SCRIPT]
    return [sys.executable, "-m", *LAUNCHERS[name], *words, *arguments]


def listening(process: psutil.Process) -> set[str]:
    """Return the addresses at which a process listens."""
    found = process.net_connections("inet")
    return {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}


@pytest.mark.full("starts a launcher and two processes, which import everything")
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_on_one_machine_no_process_listens_to_a_network(launcher: str, tmp_path: Path) -> None:
    """Torchrun's own agent listens on all interfaces: nothing of ours is kept there."""
    go, output = tmp_path / "go", tmp_path / "out"
    with started(of_launcher(launcher, "ends", str(go)), output) as process:
        there = "trained, "  # what each process prints before it waits
        assert eventually(
            lambda: process.poll() is not None or output.read_text().count(there) == 2
        )
        assert process.poll() is None, output.read_text()

        agent = psutil.Process(process.pid)
        ours = [*agent.children(recursive=True), *([agent] if launcher == "poprun" else [])]
        addresses = set().union(*map(listening, ours))

        go.touch()
        assert process.wait(HANGS) == 0, output.read_text()
    assert addresses  # gloo's, at least
    assert all(ipaddress.ip_address(address).is_loopback for address in addresses), addresses


@pytest.mark.full("starts two processes, which import everything")
@pytest.mark.parametrize("how, status", [("ends", 0), long("raises", 1), long("exits with 3", 3)])
def test_a_process_of_a_job_ends_with_its_own_status(how: str, status: int, tmp_path: Path) -> None:
    """Its threads end before Python does; otherwise Python would abort the process."""
    port, processes = str(jobs.free_port()), []
    with contextlib.ExitStack() as stack:
        for index in range(2):
            place = {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_PORT": port}
            command, output = [*SCRIPT, how], tmp_path / f"{index}.out"
            variables = {**place, **jobs.NETWORK, "GLOO_SOCKET_IFNAME": "lo"}
            processes.append(stack.enter_context(started(command, output, **variables)))
        statuses = [process.wait(HANGS) for process in processes]
    printed = [(tmp_path / f"{index}.out").read_text() for index in range(2)]
    assert statuses == [status] * 2, printed
    assert "terminate called" not in "".join(printed)


@pytest.mark.long
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("how, status", [("ends", 0), ("raises", 1)])
def test_launchers_report_how_the_script_ended(
    launcher: Any, how: Any, status: Any, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    with started(of_launcher(launcher, how), output) as process:
        ended = process.wait(HANGS)

    assert ended == status, output.read_text()
    assert "terminate called" not in output.read_text()
