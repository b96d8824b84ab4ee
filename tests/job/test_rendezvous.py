"""Processes of one start of a job meet, on two hosts too, whatever an earlier start left."""

import contextlib
import datetime
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hosts
import kills
import poptorch
from helpers import job_hosts, job_killed, jobs
from helpers.patience import HANGS, eventually
from poptorch._job import rendezvous
from poptorch._job.rendezvous import meet, open_store

LIMIT = datetime.timedelta(seconds=HANGS)


def test_each_start_has_its_own_name() -> None:
    store, names = dist.HashStore(), []
    with ThreadPoolExecutor(3) as pool:
        for first in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
            started: list[Future[str]] = []
            for index in first:
                before = store.get("invited") if store.check(["invited"]) else b""
                started.append(pool.submit(meet, store, index, 3, LIMIT))
                if index == 0 and names:  # it invites those of the last start, which do not come
                    assert eventually(lambda before=before: store.get("invited") != before)
            (name,) = {each.result(HANGS) for each in started}
            names.append(name)
    assert len({*names}) == 3


def test_the_store_of_torchruns_agent_belongs_to_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert rendezvous.store_owner() == 0
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    assert rendezvous.store_owner() == -1


def test_a_message_names_the_processes_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(poptorch.Error, match=r"process 0 of 3 has waited 0 s for process 1, 2"):
        meet(dist.HashStore(), 0, 3, datetime.timedelta(seconds=0.01))
    monkeypatch.setattr(rendezvous, "IMPATIENT", 0.001)
    store = dist.HashStore()
    store.set("arrived/1", "of an earlier start, or of the process that started this one")
    with pytest.raises(poptorch.Error, match=r"in a program that is started by a process of a job"):
        meet(store, 0, 3, datetime.timedelta(seconds=0.1))
    assert "Process 0 has waited 0 s for process 2 to begin the job" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("where", [{"MASTER_ADDR": "127.0.0.1"}, jobs.NETWORK])
def test_a_process_that_waits_for_the_others_can_be_interrupted(
    where: dict[str, str], index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's store waits in C++, for minutes."""
    folder = {"POPTORCH_JOB_DIR": str(tmp_path)}
    monkeypatch.setattr(os, "environ", jobs.environment(**where, **folder))
    os.environ["MASTER_PORT"] = str(jobs.free_port())
    interrupt = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    interrupt.start()
    with pytest.raises(KeyboardInterrupt) as caught:
        open_store(index, 2, datetime.timedelta(seconds=4))
    assert caught.value.__context__ is None  # it did not come when the store had given up
    interrupt.join()


@contextlib.contextmanager
def two_hosts() -> Iterator[Any]:
    try:
        with hosts.two_hosts() as wire:
            yield wire
    except hosts.UnavailableError as error:
        pytest.skip(f"no network namespaces: {error}")


def on_hosts(
    folder: Path, wire: Any, program: Any, *arguments: str, then: Any = lambda output: None
) -> tuple[int, str]:
    """Run a job of two processes on two hosts; return its status, and what it printed."""
    reached, variables = job_hosts.reached(folder, wire)
    words, output = [*reached, *arguments, "--num-instances=2", *program], folder / "out"
    process = jobs.fork("helpers.job_hosts", words, output, jobs.environment(**variables))
    try:
        then(output)
        return jobs.status(process), output.read_text()
    finally:
        jobs.end([process])


@pytest.mark.long
@pytest.mark.parametrize("more, ends", [([], 1), (["--max-restarts=2", "--min-instances=1"], 0)])
def test_a_cut_link_ends_a_job_or_leaves_it_one_host(
    more: list[str], ends: int, tmp_path: Path
) -> None:
    with two_hosts() as wire:

        def cut(output: Any) -> None:
            assert eventually(lambda: output.exists() and "[0] saving" in output.read_text())
            wire.cut = True

        program = [*job_killed.COMMAND, tmp_path, "1", "0"]
        status, printed = on_hosts(tmp_path, wire, program, *more, then=cut)
        assert eventually(lambda: not kills.left(tmp_path, tmp_path))  # on the other host, too
    assert status == ends, printed
    assert "of the job is lost" in printed
    assert ("continuing with 1 of 2 instances; each does the work of 2" in printed) == (not ends)
    if not ends:
        assert printed.count("[0] from step ") == 2  # 3, or 0 if that one was not whole yet
        job_killed.compare(tmp_path, 2)


@pytest.mark.long
def test_processes_on_two_hosts_train_together(tmp_path: Path) -> None:
    """Over a link of 1 ms that loses one packet of a hundred."""
    with two_hosts() as wire:
        wire.delay, wire.loss = 0.001, 0.01
        status, printed = on_hosts(tmp_path, wire, [sys.executable, "-m", "helpers.job_hosts"])
    assert status == 0, printed
    addresses = [line.split() for line in printed.splitlines() if "address" in line.split()]
    far, near = hosts.ADDRESSES
    assert sorted(addresses) == [["[0]", "address", near], ["[1]", "address", far]]
    lines = [line for line in printed.splitlines() if "weights" in line]
    assert {line.split()[0] for line in lines} == {"[0]", "[1]"}
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.cat([torch.arange(12.0).view(4, 3) / 10 + process for process in range(2)])
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), x.sum(1)).backward()
        optimizer.step()
    for line in lines:
        ours = torch.tensor([[float(word.strip("[],")) for word in line.split()[2:]]])
        torch.testing.assert_close(ours, model[0].weight.detach())


def address_of_listener(address: str, port: int) -> str:
    with socket.socket(fileno=rendezvous.listening(address, port)) as listener:
        at: str = listener.getsockname()[0]
        return at


@pytest.mark.parametrize(
    "address, at",
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        (
            "127.0.0.2",
            "0.0.0.0",
        ),  # as a host's own name often leads to, which others know elsewhere
        ("192.0.2.1", "0.0.0.0"),  # another machine's, which passes on what comes
    ],
)
def test_a_store_listens_at_the_address_that_is_named(address: str, at: str) -> None:
    assert address_of_listener(address, jobs.free_port()) == at


def test_a_port_that_something_else_listens_to_is_an_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        with pytest.raises(OSError, match="in use"):
            rendezvous.listening("127.0.0.1", port)


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"MASTER_ADDR": "127.0.0.1"}, True),
        ({"MASTER_ADDR": "host"}, False),
        ({"MASTER_ADDR": "host", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, True),
        ({"MASTER_ADDR": "host", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, False),
        (
            {"MASTER_ADDR": "host", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"},
            False,
        ),  # another job's
        (
            {"MASTER_ADDR": "host", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            True,
        ),
    ],
)
def test_launchers_and_addresses_say_whether_a_job_is_on_one_machine(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", jobs.environment(MASTER_PORT="29500", **variables))
    where = rendezvous.endpoint()
    assert where is not None

    assert rendezvous._on_one_machine(where, 2) is expected
