"""Devices: acquiring, waiting, holders that die; what scripts ask, and how executors hold them."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import poptorch
from helpers.patience import HANGS, eventually
from helpers.source_tree import PACKAGE
from helpers.wrapping import options
from poptorch import _ipu_systems, _pod

# A process that holds devices loads the pod's own modules only, not torch.
PROLOGUE = f"""
import sys, time, types
package = types.ModuleType("poptorch")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["poptorch"] = package
from poptorch import _pod
"""
FORKING = """
import os
lease = _pod.acquire(4)
if os.fork() == 0:
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""
COPYING = """
import os
lease = _pod.acquire(1)
if os.fork() == 0:
    lease.release()
    sys.exit(0)
os.wait()
print(len(_pod.holders()))
"""


@pytest.fixture(autouse=True)
def _own_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POD_DIR", str(tmp_path / "pod"))
    monkeypatch.setenv("POPTORCH_POD", "4")


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROLOGUE + code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, **environment}, **pipes)


def held() -> list[int]:
    return sorted(chip for holder in _pod.holders() for chip in holder.chips)


def test_leases_hold_different_chips() -> None:
    """Two neighbouring chips are one device: when 0 is held, neither 0 nor 1 is free."""
    one, two = _pod.acquire(1), _pod.acquire(2)

    assert one.chips == (0,)
    assert one.device_id == 0
    assert two.chips == (2, 3)
    assert two.device_id == 5
    assert held() == [0, 2, 3]


def test_a_holder_of_a_device_is_identified_by_its_process() -> None:
    lease = _pod.acquire(1)

    (holder,) = _pod.holders()

    assert holder.chips == lease.chips
    assert holder.process.pid == os.getpid()
    assert holder.process.lives is True


def test_a_lease_of_nothing_has_no_device() -> None:
    nothing = _pod.acquire(0)

    assert nothing.chips == ()
    assert nothing.device_id is None


def test_released_chips_can_be_acquired_and_a_second_release_does_nothing() -> None:
    one, two = _pod.acquire(1), _pod.acquire(2)

    one.release()
    one.release()

    assert held() == list(two.chips)
    assert _pod.acquire(2).chips == (0, 1)


def test_a_lease_gets_the_smallest_device_that_is_large_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("POPTORCH_POD", "7")

    assert _pod.acquire(3).chips == (0, 1, 2, 3)


def test_devices_of_several_chips_have_powers_of_two() -> None:
    system = _ipu_systems.System(_ipu_systems.KINDS["mk2"], 3)

    assert system.devices[3:] == [range(2)]


def test_an_id_names_a_device() -> None:
    lease = _pod.acquire(4, ipu_id=6)

    assert lease.chips == (0, 1, 2, 3)
    assert str(lease) == "Id 6"


@pytest.mark.parametrize(
    "count, ipu_id, message",
    [
        (1, 2, "Failed to acquire device Id 2"),
        (1, 7, r"(?s)device Id 7.*the ids of virtual-mk2-4 are 0 to 6"),
        (2, 0, "Expected at least replication factor"),
        (1, None, r"(?s)acquire 1 IPU\(s\).*held by process OWN_PID.*WAIT_FOR_IPU=1"),
    ],
)
def test_a_device_that_is_in_use_too_small_or_missing_is_refused(
    count: int, ipu_id: int | None, message: str
) -> None:
    lease = _pod.acquire(4, ipu_id=6)

    with pytest.raises(poptorch.Error, match=message.replace("OWN_PID", str(os.getpid()))):
        _pod.acquire(count, ipu_id)

    lease.release()


def test_a_forgotten_lease_is_given_back() -> None:
    lease = _pod.acquire(4)
    assert held() == [0, 1, 2, 3]

    del lease
    gc.collect()

    assert held() == []


def test_a_device_that_is_larger_than_needed_is_taken_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("WARNING", logger="poptorch:cpp"):
        lease = _pod.acquire(1, ipu_id=5)

    assert lease.chips == (2, 3)
    assert "1 are unused" in caplog.text


@pytest.mark.spec("runtime", 12)
def test_a_device_that_the_system_never_has_is_refused_even_when_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(poptorch.Error, match="No device found on the system with 8 IPUs"):
        _pod.acquire(8, wait=True)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 99"):
        _pod.acquire(1, ipu_id=99, wait=True)
    monkeypatch.setenv("POPTORCH_POD", "0")
    with pytest.raises(poptorch.Error, match=r"(?s)No IPU detected in the system.*gc-monitor"):
        _pod.acquire(1, wait=True)


@pytest.mark.slow
def test_a_killed_holder_holds_nothing_nor_do_its_children() -> None:
    holder = start(FORKING)
    assert holder.stdout.readline() == "held\n"
    assert held() == [0, 1, 2, 3]
    with pytest.raises(poptorch.Error, match=f"process {holder.pid}"):
        _pod.acquire(1)
    os.kill(holder.pid, signal.SIGKILL)
    # Not waited for: it is still in the table of processes, as a zombie.
    assert eventually(lambda: not held())
    assert _pod.acquire(4).chips == (0, 1, 2, 3)
    holder.communicate()  # lets the child end


@pytest.mark.slow
def test_by_default_other_processes_do_not_block_a_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("POPTORCH_POD_DIR")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    holder = start(FORKING, TMPDIR=str(tmp_path))
    assert holder.stdout.readline() == "held\n"
    assert held() == [0, 1, 2, 3]
    lease = _pod.acquire(2)
    assert lease.chips == (0, 1)
    assert held() == [0, 0, 1, 1, 2, 3]
    assert f"is held by process {holder.pid}" in caplog.text
    assert "set POPTORCH_POD_DIR" in caplog.text
    with pytest.raises(poptorch.Error, match="Failed to acquire"):
        _pod.acquire(4)  # two are this process's
    holder.kill()
    holder.communicate()


@pytest.mark.slow
def test_a_shared_pod_whose_devices_are_all_in_use_is_an_error_that_names_the_holder() -> None:
    holder = start(FORKING)
    assert holder.stdout.readline() == "held\n"

    with pytest.raises(poptorch.Error, match=rf"held by process {holder.pid}") as caught:
        _pod.acquire(2)

    assert "POPTORCH_WAIT_FOR_IPU=1" in str(caught.value)
    holder.kill()
    holder.communicate()


@pytest.mark.slow
def test_a_forked_copy_of_a_lease_gives_nothing_back() -> None:
    output, _ = start(COPYING).communicate(timeout=HANGS)
    assert output == "1\n"
    assert held() == []


WAITER = """
lease = _pod.acquire(4, wait=True)
print(lease.device_id, time.monotonic(), end=" ", flush=True)
time.sleep(0.1)
print(time.monotonic(), flush=True)
lease.release()
"""


@pytest.mark.slow
def test_processes_wait_for_chips_that_others_have() -> None:
    processes, stays = [start(WAITER, POPTORCH_POD="8") for _ in range(3)], []
    for process in processes:
        output, _ = process.communicate(timeout=HANGS)
        assert process.returncode == 0
        device, began, ended = output.split()
        stays.append((device, float(began), float(ended)))
    assert {device for device, _, _ in stays} == {"12", "13"}
    for at, (device, began, ended) in enumerate(stays):
        for other, start_other, end_other in stays[:at]:
            assert device != other or ended <= start_other or end_other <= began


def test_a_reused_process_id_does_not_hold_chips() -> None:
    _pod.acquire(1).release()
    path = Path(os.environ["POPTORCH_POD_DIR"]) / "virtual-mk2-4.old.json"
    entry = {
        "device": 0,
        "chips": [0],
        "since": 0.0,
        "process": {"pid": os.getpid(), "started": 1, "command": "python", "user": "me"},
    }
    path.write_text(json.dumps(entry))
    assert held() == []
    assert _pod.acquire(1).chips == (0,)
    assert not path.exists()


def test_a_link_in_a_shared_folder_is_not_written_through(tmp_path: Path) -> None:
    """The names of temporary files cannot be known beforehand, by the number of a process say."""
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / f"{_ipu_systems.current().name}.{os.getpid()}").symlink_to(mine)
    lease = _pod.acquire(1)
    assert held() == [0]
    lease.release()
    assert mine.read_text() == "mine"


def hole(entry: Path) -> None:
    entry.touch()
    os.truncate(entry, 1 << 40)


def saying(**changes: object) -> Callable[[Path], object]:
    """Return what writes a holder's file with other values."""
    process = {"pid": os.getpid(), "started": None, "command": "python", "user": "me"}
    known = {"device": 0, "chips": [0], "process": process, "since": 1.0}
    for path, value in changes.items():
        (process if path in process else known)[path] = value
    return lambda entry: entry.write_text(json.dumps(known))


PLACES = {
    "garbage": lambda entry: entry.write_text("{}garbage"),
    "a pipe": os.mkfifo,
    "no chips": saying(chips=7),
    "texts as chips": saying(chips=["0"]),
    "a text as number": saying(pid="1"),
    "a huge number": saying(pid=1 << 80),
    "a negative number": saying(pid=-1),
    "a text as time": saying(since="x"),
    "no time": saying(since=float("nan")),
    "a device without number": saying(device=None),
    "a command that is none": saying(command=5),
    "a start that is none": saying(started=[]),
    "no process": saying(process=[]),
    "deep": lambda entry: entry.write_text("[" * 9**5),
    "a folder": lambda entry: entry.mkdir(),
    "a hole": hole,
    "no folder": lambda entry: (entry.parent.rmdir(), entry.parent.touch()),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_unusable_directory_is_one_warning(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own: list[Path] = []
    monkeypatch.setattr(_pod, "_own", own)
    (tmp_path / "pod").mkdir()
    PLACES[place](tmp_path / "pod" / f"{_ipu_systems.current().name}.x.json")
    first = _pod.acquire(1)
    with pytest.raises(poptorch.Error, match="Failed to acquire"):  # still known in this process
        _pod.acquire(_ipu_systems.current().chips)
    first.release()
    _pod.acquire(_ipu_systems.current().chips).release()
    assert caplog.text.count("POPTORCH_POD_DIR") == 1
    shutil.rmtree(own[0])


def test_collecting_a_lease_while_another_is_acquired_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = _pod.acquire(1)
    write, released = _pod._written, []

    def collect_then_write(holder: _pod.Holder, file: Path) -> Path:
        if not released:
            released.append(first.release())
        return write(holder, file)

    monkeypatch.setattr(_pod, "_written", collect_then_write)
    second = _pod.acquire(1)
    assert held() == list(second.chips)
    assert _ipu_systems.current().chips == 4


X = torch.ones(1, 2)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod of two chips."""
    monkeypatch.setenv("POPTORCH_POD", "2")


def model(ipu_id: int | None = None) -> poptorch.PoplarExecutor:
    opts = options()
    if ipu_id is not None:
        opts.useIpuId(ipu_id)
    return poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)


@pytest.mark.spec("runtime", 9, 10)
@pytest.mark.usefixtures("two")
def test_availability_is_presence_of_a_device_and_the_version_its_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [n for n in (0, 1, 2, 3, 4) if poptorch.ipuHardwareIsAvailable(n)] == [1, 2]
    lease = _pod.acquire(2)
    assert poptorch.ipuHardwareIsAvailable(2)
    lease.release()
    with pytest.raises(TypeError, match="must be a number of IPUs"):
        poptorch.ipuHardwareIsAvailable(2.0)
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert not poptorch.ipuHardwareIsAvailable()
    monkeypatch.delenv("POPTORCH_IPU_MODEL")
    monkeypatch.setenv("POPTORCH_POD", "0")
    assert not poptorch.ipuHardwareIsAvailable()
    for text, generation in (("mk1:2", 1), ("2", 2), ("bow:4", 2), ("c600:1", 21)):
        monkeypatch.setenv("POPTORCH_POD", text)
        assert poptorch.ipuHardwareVersion() == generation
    monkeypatch.setenv("POPTORCH_POD", "0")
    with pytest.raises(AssertionError, match="No IPU hardware available"):
        poptorch.ipuHardwareVersion()
    for wrong in ("many", "gpu:4", "mk2:", "-1"):
        monkeypatch.setenv("POPTORCH_POD", wrong)
        with pytest.raises(poptorch.Error, match="POPTORCH_POD does not describe a system"):
            poptorch.ipuHardwareVersion()


@pytest.mark.slow
@pytest.mark.spec("runtime", 11)
@pytest.mark.usefixtures("two")
def test_two_executors_cannot_hold_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = model(0), model(0)
    first(X)
    with pytest.raises(poptorch.Error, match="Failed to acquire device Id 0"):
        second(X)
    first.detachFromDevice()
    second(X)
    second.destroy()
    first.attachToDevice()
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    threading.Timer(0.3, first.detachFromDevice).start()
    second(X)  # waits
    assert not first.isAttachedToDevice()
    assert [holder.device for holder in _pod.holders()] == [0]


@pytest.mark.spec("runtime", 1, 34)
@pytest.mark.usefixtures("two")
def test_a_device_is_held_from_acquisition_to_release() -> None:
    executors = [model(), model()]
    assert _pod.holders() == []
    for executor in executors:
        executor(X)
    assert sorted(holder.device for holder in _pod.holders()) == [0, 1]
    with pytest.raises(poptorch.Error, match=r"Failed to acquire 1 IPU\(s\)"):
        model()(X)
    executors[0].destroy()
    assert [holder.device for holder in _pod.holders()] == [1]
    executors.pop()
    del executor
    assert _pod.holders() == []  # collected


@pytest.mark.spec("runtime", 32)
@pytest.mark.usefixtures("two")
def test_use_ipu_id_takes_ids_of_the_system_and_blocks_take_ids_of_the_model() -> None:
    def blocks(x: torch.Tensor) -> torch.Tensor:
        with poptorch.Block("A", ipu_id=0):
            x = x * 2
        with poptorch.Block("B", ipu_id=1):
            return x + 1

    executor = poptorch.inferenceModel(blocks, options(iterations=2).useIpuId(2))
    assert torch.equal(executor(torch.ones(2)), torch.full((2,), 3.0))
    assert [(holder.device, holder.chips) for holder in _pod.holders()] == [(2, (0, 1))]


def test_a_machine_without_devices_still_simulates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POD", "0")
    with pytest.raises(poptorch.Error, match="No IPU detected in the system"):
        model()(X)
    poptorch.inferenceModel(torch.nn.Linear(2, 2), options().useIpuModel(True))(X)
    assert _pod.holders() == []
