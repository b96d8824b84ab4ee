"""Trace channels: nothing without the variable, events of torch's profiler with it."""

import importlib.util
import json
from pathlib import Path

import pytest

import pva
from helpers import programs
from helpers.data_sets import Numbers


@pytest.mark.spec("runtime", 23)
@pytest.mark.parametrize("text", ["", '{"enable":"false"}', "[]"])
def test_options_that_say_no_or_nothing_change_nothing(text: str, monkeypatch, caplog) -> None:
    """They are read when the module is imported."""
    monkeypatch.setenv("PVTI_OPTIONS", text)
    spec = importlib.util.find_spec("poptorch.profiling")
    profiling = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(profiling)
    channel = profiling.Channel("mine")
    data = Numbers(4)  # whose ``__getitem__`` is its class's
    assert channel.instrument(data, "__getitem__") is data
    assert type(data) is Numbers
    with channel.tracepoint("step") as nothing:
        assert nothing is None
    assert ("PVTI_OPTIONS is ignored" in caplog.text) is (text == "[]")


PROGRAM = """
import json, pickle, sys, torch
from torch import nn
import poptorch

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return torch.full((3,), float(index)), torch.tensor(index % 2)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x, y=None):
        out = self.layer(x)
        return out if y is None else (out, nn.functional.cross_entropy(out, y))

options = poptorch.Options().backend("reference").showCompilationProgressBar(False)
channel = poptorch.profiling.Channel("mine")
numbers = channel.instrument([1, 2], "append")
other = pickle.loads(pickle.dumps(channel.instrument(Data(), "__len__")))
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    loader = poptorch.DataLoader(options, Data(), 2)
    assert isinstance(loader.dataset, Data)
    training = poptorch.trainingModel(Net(), options)
    for x, y in loader:
        training(x, y)
    training.copyWeightsToHost()
    training.setOptimizer(torch.optim.SGD(training.model.parameters(), lr=0.1))
    training.destroy()
    with channel.tracepoint("step"):
        len(other), len(numbers)
names = {event.key: event.count for event in profile.key_averages()}
json.dump({name: count for name, count in names.items() if "aten" not in name}, sys.stdout)
"""


@pytest.mark.slow
@pytest.mark.spec("runtime", 14)
def test_channels_record_events(tmp_path: Path) -> None:
    ours = programs.with_ours(PVTI_OPTIONS='{"enable":"true","directory":"traces"}')
    done = programs.run("-c", PROGRAM, folder=tmp_path, environment=ours)
    assert done.returncode == 0, done.stderr
    events = json.loads(done.stdout)
    ours = {name: n for name, n in events.items() if name.startswith(("poptorch.", "dataset", "m"))}
    assert ours == {
        "dataset.__getitem__": 4, "mine.step": 1, "mine.__len__": 1,
        "poptorch.trainingModel.modelCompilation": 1, "poptorch.trainingModel.modelExecution": 2,
        "poptorch.trainingModel.copyWeightsToHost": 1, "poptorch.trainingModel.setOptimizer": 1,
        "poptorch.trainingModel.destroy": 1,
    }  # fmt: skip
    (path,) = (tmp_path / "traces").iterdir()
    (process,) = pva.openTrace(path).processes.values()
    outer = [event for thread in process.threads.values() for event in thread.events]
    calls = [event for event in outer if event.label == "modelExecution"]
    assert len(calls) == 2
    assert [event.label for event in calls[0].children()] == ["modelCompilation"]
    assert all(event.channel == "poptorch.trainingModel" for event in calls)
