"""What scripts ask about devices, and how executors hold them (spec/runtime.md section 4)."""

import threading

import pytest
import torch

import poptorch
from poptorch import _pod

X = torch.ones(1, 2)


@pytest.fixture(autouse=True)
def _own_pod(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POD_DIR", str(tmp_path))
    monkeypatch.setenv("POPTORCH_POD", "2")


def model(ipu_id: int | None = None, **attributes) -> poptorch.PoplarExecutor:
    opts = poptorch.Options().showCompilationProgressBar(False).backend("reference")
    if ipu_id is not None:
        opts.useIpuId(ipu_id)
    return poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)


@pytest.mark.spec("runtime", 9, 10)
def test_availability_is_presence_of_a_device_and_the_version_its_generation(monkeypatch) -> None:
    assert [n for n in (0, 1, 2, 3, 4) if poptorch.ipuHardwareIsAvailable(n)] == [1, 2]
    lease = _pod.acquire(2)
    assert poptorch.ipuHardwareIsAvailable(2)
    lease.release()
    with pytest.raises(TypeError, match="takes a number of IPUs"):
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
        with pytest.raises(poptorch.Error, match="POPTORCH_POD describes no system"):
            poptorch.ipuHardwareVersion()


@pytest.mark.slow
@pytest.mark.spec("runtime", 11)
def test_two_executors_cannot_hold_one_device(monkeypatch) -> None:
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
def test_ids_are_the_machines_and_block_devices_the_models_own() -> None:
    def two(x):
        with poptorch.Block("A", ipu_id=0):
            x = x * 2
        with poptorch.Block("B", ipu_id=1):
            return x + 1

    opts = poptorch.Options().showCompilationProgressBar(False).deviceIterations(2)
    executor = poptorch.inferenceModel(two, opts.backend("reference").useIpuId(2))
    assert torch.equal(executor(torch.ones(2)), torch.full((2,), 3.0))
    assert [(holder.device, holder.chips) for holder in _pod.holders()] == [(2, (0, 1))]


def test_a_machine_without_devices_still_simulates(monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_POD", "0")
    with pytest.raises(poptorch.Error, match="No IPU detected in the system"):
        model()(X)
    opts = poptorch.Options().showCompilationProgressBar(False).useIpuModel(True)
    poptorch.inferenceModel(torch.nn.Linear(2, 2), opts.backend("reference"))(X)
    assert _pod.holders() == []
