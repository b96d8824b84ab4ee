"""state_dict and load_state_dict: the two extra keys, when the device is read, what is refused."""

import contextlib
import gc
import io

import pytest
import torch

import poptorch
from poptorch import optim


class FakeDevice:
    """Stands for the executor: counts how often its state is read."""

    def __init__(self):
        self.reads = 0

    def lock(self):
        return contextlib.nullcontext()

    def read_state(self):
        self.reads += 1
        return {"Accl1___w": torch.full((2,), float(self.reads))}, {"lr": torch.tensor(0.1)}


@pytest.fixture
def weight():
    return torch.nn.Parameter(torch.zeros(2))


def attached(weight):
    optimizer, device = optim.Adam([weight], lr=0.1), FakeDevice()
    optimizer._attach_device(device)
    optimizer.host_state_is_dirty = True  # as after compilation or a training call
    return optimizer, device


def test_before_compilation(weight):
    optimizer = optim.Adam([weight])
    saved = optimizer.state_dict()
    assert saved["ipu_state"] is None
    assert saved["ipu_param"] is None
    assert {"state", "param_groups"} < set(saved)
    assert not optimizer.has_state()


@pytest.mark.spec("optimizers", 15)
def test_the_device_is_read_once_until_it_runs_again(weight):
    optimizer, device = attached(weight)
    assert optimizer.get_state_dict()["ipu_state"] is None
    first = optimizer.state_dict()
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]
    assert device.reads == 1
    optimizer.host_state_is_dirty = True
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"].tolist() == [2, 2]
    assert first["ipu_state"]["Accl1___w"].tolist() == [1, 1]
    assert optimizer.has_state()


def test_detaching_reads_first_and_a_lost_device_does_no_harm(weight):
    optimizer, device = attached(weight)
    optimizer._detach_device()
    optimizer.host_state_is_dirty = True
    assert optimizer.state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]
    assert device.reads == 1
    optimizer, device = attached(weight)
    del device
    gc.collect()
    assert optimizer.state_dict()["ipu_state"] is None


def test_state_dict_hooks_still_run(weight):
    optimizer, _ = attached(weight)
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "mine": 1})
    assert optimizer.state_dict()["mine"] == 1


def test_what_was_loaded_reads_back_exactly(weight):
    optimizer, device = attached(weight)
    saved = optimizer.state_dict()
    saved["ipu_state"] = {"Accl2___w": torch.ones(2)}
    optimizer.host_state_is_dirty = True
    optimizer.load_state_dict(saved)
    assert optimizer.ipu_state_is_dirty
    assert not optimizer.host_state_is_dirty
    assert [*optimizer.state_dict()["ipu_state"]] == ["Accl2___w"]
    assert device.reads == 1


@pytest.mark.spec("optimizers", 16)
@pytest.mark.parametrize("missing", [("ipu_state", "ipu_param"), ("ipu_state",), ("ipu_param",)])
def test_states_of_torch_are_refused(weight, missing):
    optimizer, _ = attached(weight)
    before = optimizer.state_dict()
    native = torch.optim.Adam([weight], lr=0.5).state_dict()
    native |= {key: {} for key in before if key.startswith("ipu") and key not in missing}
    with pytest.raises(RuntimeError, match="Only IPU optimizer states can be loaded") as caught:
        optimizer.load_state_dict(native)
    assert isinstance(caught.value, poptorch.Error)
    assert optimizer.state_dict() == before
    assert not optimizer.ipu_state_is_dirty


def test_other_wrong_states_change_nothing(weight):
    optimizer, _ = attached(weight)
    before = optimizer.state_dict()
    for empty in ({}, None):
        with pytest.raises(RuntimeError, match="because it is empty"):
            optimizer.load_state_dict(empty)
    two_groups = {**before, "param_groups": before["param_groups"] * 2}
    with pytest.raises(ValueError, match="parameter group"):
        optimizer.load_state_dict(two_groups)
    with pytest.raises(RuntimeError, match="Only IPU"):
        optimizer.load_state_dict({**before, "ipu_state": 3})
    assert optimizer.state_dict() == before
    assert not optimizer.ipu_state_is_dirty


def test_none_loads_only_torchs_part(weight):
    optimizer = optim.Adam([weight], lr=0.1)
    native = torch.optim.Adam([weight], lr=0.5).state_dict()
    optimizer.load_state_dict({"ipu_state": None, "ipu_param": None, **native})
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.has_state()
    assert not optimizer.ipu_state_is_dirty


@pytest.mark.spec("optimizers", 19)
def test_a_checkpoint_carries_state_and_rate(weight):
    optimizer, _ = attached(weight)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer._opt_called = True
    scheduler.step()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    other = optim.Adam([weight], lr=0.1)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.param_groups[0]["lr"] == 0.05
    assert other.get_state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]
    assert other.ipu_state_is_dirty
    # Rebuilt at epoch 1 it makes the step to epoch 2, from the stored rate.
    torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5, last_epoch=scheduler.last_epoch)
    assert other.param_groups[0]["lr"] == 0.025


def test_an_unsynchronised_device_is_read_before_pickling(weight):
    optimizer, _ = attached(weight)
    assert optimizer.__getstate__()["ipu_state"]["Accl1___w"].tolist() == [1, 1]
