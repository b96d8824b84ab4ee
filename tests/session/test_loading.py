"""Files that a stranger wrote with care: all digests are right, and what they say is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import poptorch
from helpers.wrapped import normal, options
from poptorch._base import archive

X = normal(4, 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.norm(self.layer(x)), "sum")


def made(value: float = 7.0) -> tuple[Net, torch.optim.Optimizer]:
    """A model with one value in all weights, and its optimizer."""
    model = Net()
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model, poptorch.optim.Adam(model.parameters(), lr=0.5)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "m"
    model, optimizer = made(0.25)
    executor = poptorch.trainingModel(model, options(), optimizer)
    executor.compileAndExport(path, X)
    executor.destroy()
    return path.read_bytes()


Facts, Tensors = dict[str, Any], dict[str, torch.Tensor]


def of_type(key: str, dtype: torch.dtype) -> Callable[[Facts, Tensors], None]:
    def change(_: Facts, tensors: Tensors) -> None:
        tensors[key] = tensors[key].to(dtype)

    return change


def rate(value: object) -> Callable[[Facts, Tensors], None]:
    return lambda facts, _: facts["hypers"][1].update(lr=value)


def option(call: str) -> Callable[[Facts, Tensors], None]:
    return lambda facts, _: facts.update(options=call)


CHANGES = {
    "complex weights": of_type("model.layer.weight", torch.complex64),
    "a counter with fractions": of_type("model.norm.num_batches_tracked", torch.float32),
    "complex moments": of_type("device.optstate.first.layer.weight", torch.complex64),
    "a rate that is no float": rate(10**400),
    "a rate that is a flag": rate(True),
    "a rate that is a dictionary": rate({"dict": []}),
    "a flag that is a rate": lambda facts, _: facts["hypers"][1].update(amsgrad=0.5),
    "an anchor that is a text": option("createOrSet(anchored_tensors={'a': 'b'})"),
    "a location that is a number": option("TensorLocations.createOrSet(location_weight=1)"),
    "a text without an end": option(
        f"createOrSet(model_name=poptorch.ConnectionType.Always.name.ljust({1 << 60}))"
    ),
    "a number without an end": option(
        f"createOrSet(model_name=poptorch.ConnectionType.Never.to_bytes({1 << 60}))"
    ),
    "a random state that is too short, and no arguments": lambda facts, _: facts.update(
        random=[1, 2], arguments=None
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_values_of_strangers_are_refused_and_nothing_has_changed(
    change: str, saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    path.write_bytes(saved)
    parts = archive.read(path)
    facts = json.loads(parts["facts.json"])
    tensors = safetensors.torch.load(parts["tensors.safetensors"])
    CHANGES[change](facts, tensors)
    changed = {
        "facts.json": json.dumps(facts).encode(),
        "tensors.safetensors": safetensors.torch.save(tensors),
    }
    archive.write(path, parts | changed)
    model, optimizer = made()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    with pytest.raises(poptorch.Error) as caught:
        poptorch.load(path, model=model, optimizer=optimizer)
    assert not isinstance(caught.value.__cause__, MemoryError | OverflowError)
    assert type(model) is Net
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == groups


def test_weights_that_cannot_be_put_leave_the_others_as_they_were(
    saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    path.write_bytes(saved)
    model, optimizer = made()
    model.norm.running_var = torch.ones(1).expand(2)  # two numbers in one place
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="single memory location"):
        poptorch.load(path, model=model, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_names_in_a_file_give_a_terminal_no_commands(saved: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m"
    path.write_bytes(saved)
    parts = archive.read(path)
    tensors = safetensors.torch.load(parts["tensors.safetensors"])
    tensors["model.\x1b[2Jall is well\u202e"] = torch.zeros(1)
    archive.write(path, parts | {"tensors.safetensors": safetensors.torch.save(tensors)})
    model, optimizer = made()
    with pytest.raises(poptorch.Error, match="all is well") as caught:
        poptorch.load(path, model=model, optimizer=optimizer)
    assert "\x1b" not in str(caught.value)
    assert "\u202e" not in str(caught.value)
    assert "\\x1b[2J" in str(caught.value)
