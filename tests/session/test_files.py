"""Saved executables: what comes back, what is refused, what is never run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.models_to_save import Net
from helpers.source_tree import ROOT
from helpers.wrapped import normal, options
from poptorch import ConnectionType
from poptorch._base import archive
from poptorch._compile import cache
from poptorch.backends.inductor import Inductor

X, Y = normal(8, 4), normal(8, 4, seed=1)
OPTIMIZERS = {
    "poptorch": lambda p: poptorch.optim.Adam(p, lr=0.01),
    "torch": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def into(optimizer: str | None = None) -> dict:
    """What ``poptorch.load`` puts a saved Net into."""
    torch.manual_seed(99)
    model = Net()
    chosen = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
    return {"model": model, "optimizer": chosen}


def training(optimizer: str = "poptorch", opts: poptorch.Options | None = None):
    model = Net()
    opts = opts or options(accumulation=2).randomSeed(3)
    return poptorch.trainingModel(model, opts, OPTIMIZERS[optimizer](model.parameters()))


@pytest.mark.slow
@pytest.mark.spec("executor", 40, 53, 62)
@pytest.mark.parametrize("backend", ["reference", "staged"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("trusted", [False, True])
def test_a_loaded_trainer_continues(
    backend: str, optimizer: str, trusted: bool, tmp_path: Path
) -> None:
    opts = options(accumulation=2).randomSeed(3).backend(backend)
    first = training(optimizer, opts)
    for _ in range(2):
        first(X, Y)
    path = tmp_path / "model.poptorch"
    first.save(path)
    expected = [first(X, Y) for _ in range(3)]
    if trusted:
        second = poptorch.load(path, trusted=True)
    else:
        second = poptorch.load(path, options=opts, **into(optimizer))
    assert second.isCompiled()
    assert type(second.model).__name__ == "PoptorchNet"
    got = [second(X, Y) for _ in range(3)]
    for (out, loss), (out_again, loss_again) in zip(expected, got, strict=True):
        assert torch.equal(out, out_again)
        assert torch.equal(loss, loss_again)
    assert second.model.first.weight is second.model.second.weight
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    second.setOptimizer(OPTIMIZERS[optimizer](second.model.parameters()))
    second.destroy()
    assert type(second.model) is Net


@pytest.mark.slow
@pytest.mark.spec("executor", 63)
def test_a_file_from_before_any_run(tmp_path: Path) -> None:
    first = training()
    first.compileAndExport(tmp_path / "m.poptorch", X, Y)
    expected = first(X, Y)
    second = poptorch.load(tmp_path / "m.poptorch", trusted=True)
    assert second.rng_state == [3]
    assert torch.equal(second(X, Y)[0], expected[0])


@pytest.mark.slow
def test_hyper_parameters_come_from_the_file(tmp_path: Path) -> None:
    first = training()
    first.setOptimizer(poptorch.optim.Adam(first.model.parameters(), lr=0.5, loss_scaling=4.0))
    first.compileAndExport(tmp_path / "m.poptorch", X, Y)
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1, loss_scaling=2.0)
    file = tmp_path / "m.poptorch"
    second = poptorch.load(file, options=first.options, model=model, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.loss_scaling == 4.0
    assert second.plan().describe() == first.plan().describe()


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", -0.5), ("lr", float("nan")), ("betas", [-0.1, 0.9]), ("eps", -1), ("lr", 1e308),
     ("weight_decay", 10**39)],
)  # fmt: skip
def test_hyper_parameters_out_of_range_stay_in_the_file(name: str, value, tmp_path: Path) -> None:
    """A rate below zero would train uphill, without a word."""
    first = training()
    file = tmp_path / "m.poptorch"
    first.compileAndExport(file, X, Y)
    hypers = json.loads(archive.read(file)["facts.json"])["hypers"]
    hypers[1][name] = value
    with_facts(file, hypers=hypers)
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    before = optimizer.param_groups[0][name]
    with pytest.raises(poptorch.Error, match="a hyper-parameter is out of range") as caught:
        poptorch.load(file, model=model, optimizer=optimizer)
    assert f"{name} is {value}" in str(caught.value)
    assert optimizer.param_groups[0][name] == before


def test_a_number_that_is_too_large_for_the_device_stays_in_the_file(tmp_path: Path) -> None:
    first = training()
    file = tmp_path / "m.poptorch"
    first.compileAndExport(file, X, Y)
    hypers = json.loads(archive.read(file)["facts.json"])["hypers"]
    hypers[0]["loss_scaling"] = 1e308
    with_facts(file, hypers=hypers)
    model = Net()
    before = [parameter.clone() for parameter in model.parameters()]
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    with pytest.raises(poptorch.Error, match="given for loss_scaling is too large"):
        poptorch.load(file, model=model, optimizer=optimizer)
    assert optimizer.loss_scaling == 1.0
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
@pytest.mark.spec("runtime", 24, 25)
def test_compiled_without_a_device(tmp_path: Path, caplog) -> None:
    model = Net().eval()
    offline = poptorch.inferenceModel(model, options(iterations=2).useOfflineIpuTarget(21))
    path = tmp_path / "m.poptorch"
    offline.compileAndExport(path, X)
    assert not offline.isAttachedToDevice()
    seen = []

    def edit(opts: poptorch.Options) -> str:
        seen.append((opts.connection_type, opts.exists("ipu_version")))
        opts.logDir("logs").connectionType(ConnectionType.OnDemand)
        return "ignored"

    loaded = poptorch.load(path, edit, trusted=True)
    assert seen == [(ConnectionType.Always, False)]
    assert loaded.options.log_dir == "logs"
    assert "other settings" not in caplog.text
    got = loaded(X)
    assert got["mode"] == "mean"
    torch.testing.assert_close(got["out"], model(X)["out"].detach())
    with pytest.raises(poptorch.Error, match="Value mismatch for mode"):
        loaded(X, mode="sum")
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        loaded(X[:4])


@pytest.mark.spec("executor", 43)
def test_files_without_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Local(Net):
        """Not importable by name."""

    model = Local().eval()
    wrapper = poptorch.inferenceModel(model, options())
    wrapper.compileAndExport(tmp_path / "whole.poptorch", X)
    assert "The model cannot be pickled" in caplog.text
    with pytest.raises(poptorch.Error, match=r"holds no objects"):
        poptorch.load(tmp_path / "whole.poptorch", trusted=True)
    loaded = poptorch.load(tmp_path / "whole.poptorch", model=Local().eval())
    assert torch.equal(loaded(X)["out"], wrapper(X)["out"])
    wrapper.save(tmp_path / "m.poptorch", export_model=False)
    with pytest.raises(AssertionError, match=r"(?s)without its model.*loadExecutable"):
        poptorch.load(tmp_path / "m.poptorch")
    other = Local().eval()
    again = poptorch.inferenceModel(other, options())
    again.loadExecutable(tmp_path / "m.poptorch")
    assert again.isCompiled()
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        again(X[:4])
    out = again(X)["out"]
    torch.testing.assert_close(out, other(X)["out"].detach())  # the present module's weights
    wrong = Local().eval()
    wrong.second.bias = None
    with pytest.raises(
        poptorch.Error, match=r"another model(?s:.)*second.bias: \(4,\) in the file"
    ):
        poptorch.inferenceModel(wrong, options()).loadExecutable(tmp_path / "m.poptorch")
    wrong = poptorch.inferenceModel(nn.Linear(4, 4), options())
    with pytest.raises(poptorch.Error, match="saved from another model"):
        wrong.loadExecutable(tmp_path / "m.poptorch")
    with pytest.raises(poptorch.Error, match="needs trainingModel"):
        poptorch.trainingModel(Local(), options()).loadExecutable(tmp_path / "m.poptorch")


def test_what_is_loaded_into_must_fit(tmp_path: Path) -> None:
    path = tmp_path / "m.poptorch"
    training("torch").compileAndExport(path, X, Y)
    target = into("torch")
    before = {name: value.clone() for name, value in target["model"].state_dict().items()}
    with pytest.raises(poptorch.Error, match=r"(?s)compiled for training.*optimizer=SGD"):
        poptorch.load(path, model=target["model"])
    with pytest.raises(poptorch.Error, match="another optimizer"):
        poptorch.load(path, model=target["model"], optimizer=into("poptorch")["optimizer"])
    trainer = poptorch.trainingModel(Net(), options())  # SGD, as in the file
    trainer.loadExecutable(path)
    assert trainer.isCompiled()
    other = Net()
    trainer = poptorch.trainingModel(other, options(), torch.optim.Adam(other.parameters()))
    with pytest.raises(poptorch.Error, match=r"(?s)another optimizer.*sgd in the file, adam here"):
        trainer.loadExecutable(path)
    with pytest.raises(poptorch.Error, match=r"(?s)another model.*bias: None in the file"):
        linear = nn.Linear(4, 4)
        optimizer = OPTIMIZERS["torch"](linear.parameters())
        poptorch.load(path, model=linear, optimizer=optimizer)
    with pytest.raises(poptorch.Error, match="Superfluous loss"):
        poptorch.load(path, **target, loss=nn.MSELoss())
    after = target["model"].state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert type(target["model"]) is Net


class Depends(nn.Module):
    """Takes a path that depends on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight if x.sum() > 0 else x - self.weight


class Custom:
    """No plain value."""


def test_what_cannot_be_compiled_for_while_loading(tmp_path: Path) -> None:
    """Made-up arguments would freeze the wrong branch; a type of the user's is not in the file."""
    path = tmp_path / "m.poptorch"
    positive = X.abs()
    first = poptorch.inferenceModel(Depends(), options())
    first.compileAndExport(path, positive)
    second = poptorch.load(path, model=Depends())
    assert not second.isCompiled()
    assert torch.equal(second(positive), first(positive))
    poptorch.inferenceModel(nn.Linear(4, 4), options()).compileAndExport(path, X)

    class Changed(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.sum() > 0 else input

    with pytest.raises(poptorch.Error, match="depends on the values of its inputs"):
        poptorch.load(path, model=Changed(4, 4))

    class Takes(nn.Linear):
        def forward(self, input: torch.Tensor, extra: object = None) -> torch.Tensor:
            return super().forward(input)

    saved = poptorch.inferenceModel(Takes(4, 4), options())
    saved.compileAndExport(path, X, Custom())
    assert not poptorch.load(path, model=Takes(4, 4)).isCompiled()


def test_files_hold_no_values_of_the_arguments(tmp_path: Path) -> None:
    saved = poptorch.inferenceModel(nn.Linear(4, 4), options())
    marked = torch.full((2, 4), 1234.5)
    saved(marked)
    saved.compileAndExport(tmp_path / "m", marked)
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    weight = saved.model.weight.detach().numpy().tobytes()
    assert any(weight in content for content in contents)  # they would be found
    assert not any(marked[:1].numpy().tobytes() in content for content in contents)


@pytest.mark.parametrize("value", [None, True, 3, 2.5, "text", torch.float16, [1, (2.0, {"a": X})]])
def test_arguments_of_plain_types(value: object, tmp_path: Path) -> None:
    class Takes(nn.Module):
        def forward(self, x, *more, flag=None, **named):
            return x + len(more), flag, named

    first = poptorch.inferenceModel(Takes(), options())
    first.compileAndExport(tmp_path / "m", X, X, flag=value, other=X)
    second = poptorch.load(tmp_path / "m", model=Takes())
    assert second.isCompiled()
    assert torch.equal(second(X, X, flag=value, other=X)[0], X + 1)


@pytest.mark.slow
def test_options_come_from_the_file(tmp_path: Path) -> None:
    opts = options(accumulation=4).outputMode(poptorch.OutputMode.Sum).randomSeed(7)
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a"), poptorch.Stage("b")))
    opts.Precision.enableStochasticRounding(True)
    opts.logDir(str(tmp_path)).enableExecutableCaching(str(tmp_path / "cache"))

    class Blocks(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
            with poptorch.Block("a"):
                x = x * 1
            with poptorch.Block("b"):
                return super().forward(x, y)

    model = Blocks()
    first = poptorch.trainingModel(model, opts, OPTIMIZERS["torch"](model.parameters()))
    first.compileAndExport(tmp_path / "m", X, Y)
    target = Blocks()
    optimizer = OPTIMIZERS["torch"](target.parameters())
    second = poptorch.load(tmp_path / "m", model=target, optimizer=optimizer)
    before, after = repr(first.options), repr(second.options)
    assert "cache" in before
    assert "cache" not in after
    for place in (str(tmp_path / "cache"), str(tmp_path)):
        before = before.replace(place, ".")
    assert second.options.log_dir == "."
    assert second.options.output_mode == poptorch.OutputMode.Sum
    assert second.plan().describe() == first.plan().describe()
    assert torch.equal(second(X, Y)[1], first(X, Y)[1])


CALLS = {
    "a method that reads": "loadFromFile('{pipe}')",
    "a call of a call": "deviceIterations(2).loadFromFile('{pipe}')",
    "JSON": "from_json('{{}}')",
    "an import": "deviceIterations(__import__('os').system('true'))",
    "a private name": "_freeze()",
    "no call": "deviceIterations",
    "no Python": "deviceIterations(",
    "a wrong value": "deviceIterations(-1)",
    "depth": "deviceIterations(" + "(" * 5000 + ")" * 5000 + ")",
}


@pytest.mark.parametrize("call", CALLS)
def test_options_of_strangers(call: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # whoever opens it waits for ever
    path = exported(tmp_path)
    with_facts(path, options=CALLS[call].format(pipe=tmp_path / "pipe"))
    with pytest.raises(poptorch.Error, match="Invalid file"):
        poptorch.load(path, model=nn.Linear(4, 4))


def test_folders_in_options_of_strangers(tmp_path: Path) -> None:
    path = exported(tmp_path)
    folder = tmp_path / "stranger"
    calls = f"createOrSet(log_dir='{folder}')\nenableExecutableCaching('{folder}')"
    with_facts(path, options=calls)
    with pytest.raises(poptorch.Error, match=r"no option: options\.enableExecutableCaching"):
        poptorch.load(path, model=nn.Linear(4, 4))
    with_facts(path, options=calls.splitlines()[0])
    assert poptorch.load(path, model=nn.Linear(4, 4)).options.log_dir == "."
    assert not folder.exists()


@pytest.mark.slow
def test_other_settings_than_the_file_has_are_named(tmp_path: Path, caplog) -> None:
    path = tmp_path / "m"
    training().compileAndExport(path, X, Y)
    caplog.clear()
    poptorch.load(path, options=options(accumulation=4), **into("poptorch"))
    assert "loops.accumulation: 4 here, 2 there" in caplog.text


@pytest.mark.spec("executor", 44)
def test_where_files_go(tmp_path: Path, caplog) -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        wrapper.save(tmp_path / "early.poptorch")
    wrapper(X)
    wrapper.save(tmp_path)
    assert (tmp_path / "model.poptorch").is_file()
    assert "is a directory" in caplog.text
    wrapper.save(tmp_path / "new" / "dir" / "x.poptorch")
    assert (tmp_path / "new" / "dir" / "x.poptorch").is_file()
    with pytest.raises(AssertionError, match="folder that is a file"):
        wrapper.save(tmp_path / "model.poptorch" / "x.poptorch")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.poptorch", "new"]  # nothing else


def test_losses_of_the_first_release_are_saved(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    first = poptorch.trainingModel(model, options(), loss=nn.MSELoss())
    first.compileAndExport(tmp_path / "m", X, Y)
    path = tmp_path / "m"
    expected = first(X, Y)[1]
    assert torch.equal(poptorch.load(path, trusted=True)(X, Y)[1], expected)
    other = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=1.0)
    with pytest.raises(poptorch.Error, match="A loss was appended"):
        poptorch.load(path, model=other, optimizer=optimizer)
    loaded = poptorch.load(path, model=other, optimizer=optimizer, loss=nn.MSELoss())
    assert torch.equal(loaded(X, Y)[1], expected)


def exported(tmp_path: Path) -> Path:
    path = tmp_path / "m.poptorch"
    poptorch.inferenceModel(nn.Linear(4, 4), options()).compileAndExport(path, X)
    return path


def rewritten(path: Path, **changes: bytes) -> None:
    archive.write(path, {**archive.read(path), **changes})


def opened(path: Path) -> poptorch.Error:
    """Whatever is wrong with a file, both readers refuse it and the model stays as it is."""
    target = nn.Linear(4, 4)
    before = target.weight.clone()
    for trusted in (False, True):
        with pytest.raises(AssertionError, match="Invalid file") as caught:
            poptorch.load(path, model=target, trusted=trusted)
        assert isinstance(caught.value, poptorch.Error)
    with pytest.raises(poptorch.Error, match="Invalid file") as caught:
        poptorch.inferenceModel(target, options()).loadExecutable(path)
    assert torch.equal(target.weight, before)
    return caught.value


DAMAGES = [
    "truncated", "flipped", "empty", "foreign", "version", "half", "pipe", "folder", "compressed",
    "overlapping", "twice",
]  # fmt: skip


def unpacked(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as old:
        return {name: old.read(name) for name in old.namelist()}


def packed(path: Path, parts: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, content in parts.items():
            new.writestr(name, content)


def another_version(path: Path) -> None:
    parts = unpacked(path)
    header = {**json.loads(parts[archive.HEADER]), "format": 99, "poptorch": "9.9.9"}
    packed(path, {**parts, archive.HEADER: json.dumps(header).encode()})


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def overlapping(path: Path) -> None:
    """Many names for one part: more bytes than the file has."""
    with zipfile.ZipFile(path, "a") as file:
        large = max(file.infolist(), key=lambda entry: entry.file_size)
        for at in range(50):
            twin = zipfile.ZipInfo(f"twin{at}")
            twin.header_offset, twin.CRC = large.header_offset, large.CRC
            twin.file_size = twin.compress_size = large.file_size
            file.filelist.append(twin)
        file._didModify = True


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("facts.json", b"{}")


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


DAMAGES = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:700]),
    "flipped": flipped,
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: torch.save({"a": 1}, path),
    "another version": another_version,
    "no parts": lambda path: archive.write(path, {}),
    "a pipe": pipe,
    "a folder": folder,
    "compressed": lambda path: packed(path, unpacked(path), zipfile.ZIP_DEFLATED),
    "overlapping": overlapping,
    "twice": twice,
}


@pytest.mark.spec("runtime", 26)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    DAMAGES[damage](path)
    error = opened(path)
    if damage == "another version":
        assert "9.9.9" in str(error)
        assert poptorch.__version__ in str(error)


def with_facts(path: Path, **changes: object) -> None:
    """Change facts of a file, and its digests with them."""
    parts = archive.read(path)
    facts = {**json.loads(parts["facts.json"]), **changes}
    archive.write(path, {**parts, "facts.json": json.dumps(facts).encode()})


HUGE = {"tensor": "float32", "shape": [1 << 40, 1 << 40]}
FACTS = {
    "no names": {"arguments": [1]},
    "a huge shape": {"arguments": {"input": HUGE}},
    "many dimensions": {"arguments": {"input": {"tensor": "float32", "shape": [1] * 5000}}},
    "a negative shape": {"arguments": {"input": {"tensor": "float32", "shape": [-1, 4]}}},
    "a wrong shape": {"arguments": {"input": {"tensor": "float32", "shape": "44"}}},
    "a dtype that is none": {"arguments": {"input": {"dtype": "load"}}},
    "an unknown form": {"arguments": {"input": {"module": "os"}}},
    "an unhashable key": {"arguments": {"input": {"dict": [[[1], 2]]}}},
    "a parameter that there is not": {"arguments": {"input": None, "self": 1}},
    "no parameter": {"arguments": {}},
    "settings that are none": {"settings": 5},
    "flags that are none": {"whole": "yes"},
    "an optimizer in inference": {"algorithm": "sgd"},
    "hyper-parameters that are none": {"hypers": 7},
    "a random state that is none": {"random": ["import os"]},
    "a number too large": {"random": [1 << 70]},
}


@pytest.mark.parametrize("wrong", FACTS)
def test_wrong_facts(wrong: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    with_facts(path, **FACTS[wrong])
    target = nn.Linear(4, 4)
    with pytest.raises(poptorch.Error):
        poptorch.load(path, model=target)
    assert type(target) is nn.Linear
    assert torch.equal(poptorch.inferenceModel(target, options())(X), target(X).detach())


def test_deep_facts(tmp_path: Path) -> None:
    path = exported(tmp_path)
    parts = archive.read(path)
    for depth in (900, 100_000):
        deep = b'{"arguments": ' + b"[" * depth + b"]" * depth + b"}"
        archive.write(path, {**parts, "facts.json": deep})
        opened(path)


def test_a_random_state_that_is_none(tmp_path: Path) -> None:
    path = exported(tmp_path)
    state = poptorch.load(path, model=nn.Linear(4, 4))
    state(X)
    words = len(state.rng_state)
    with_facts(path, random=[1] * words)
    with pytest.raises(poptorch.Error, match="random generator"):
        poptorch.load(path, model=nn.Linear(4, 4))


@pytest.mark.slow
def test_state_of_another_program(tmp_path: Path) -> None:
    path = tmp_path / "m"
    first = training()
    first.compileAndExport(path, X, Y)
    parts = archive.read(path)
    tensors = safetensors.torch.load(parts["tensors.safetensors"])
    tensors["device.optstate.first.first.weight"] = torch.zeros(5)
    changed = safetensors.torch.save(tensors)
    archive.write(path, {**parts, "tensors.safetensors": changed})
    target = into("poptorch")
    with pytest.raises(poptorch.Error, match=r"optstate.first.first.weight: \(5,\) in the file"):
        poptorch.load(path, **target)
    assert type(target["model"]) is Net  # and not wrapped


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        poptorch.load(tmp_path / "nothing")


CALLED: list[str] = []


def touch(*args: object) -> list[str]:
    """What no file may get called."""
    CALLED.append(repr(args))
    return []


class Reduces:
    """Pickles as a call."""

    def __init__(self, function, *args) -> None:
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def refuses(path: Path, imported: str) -> None:
    """Nothing of a file runs unless it is trusted: as data it is read, or it is refused."""
    CALLED.clear()
    with pytest.raises(poptorch.Error, match=r"(?s)not trusted.*model=Net.*trusted=True") as caught:
        poptorch.load(path)
    assert "test_files.py" in str(caught.value)
    target = nn.Linear(4, 4)
    poptorch.load(path, model=target)(X)
    poptorch.inferenceModel(target, options()).loadExecutable(path)
    assert CALLED == []
    assert imported not in sys.modules


PICKLES = {
    "a function": pickle.dumps(Reduces(touch, 1)),
    "a module that is imported": b"cpoptorch_attack\nrun\n.",
    "a call of protocol 0": b"(S'x'\nihelpers.models_to_save\nNet\n.",
    "a class of torch_geometric": b"ctorch_geometric.nn.models.glem\nGLEM\n(S'/tmp'\ntR.",
    "an endless container": pickle.dumps(Reduces(range, 1 << 40)),
}


@pytest.mark.parametrize("attack", PICKLES)
def test_pickles_of_strangers(attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "poptorch_attack.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    path = exported(tmp_path)
    rewritten(path, **{"objects.pickle": PICKLES[attack]})
    before = set(sys.modules)
    refuses(path, "poptorch_attack")
    assert not [name for name in {*sys.modules} - before if name.startswith("torch_geometric")]


def test_an_enum_cannot_be_changed(tmp_path: Path) -> None:
    path, value = exported(tmp_path), poptorch.OutputMode.All.value
    state = pickle.dumps((poptorch.OutputMode.All, {"_value_": 5}))[:-1] + pickle.BUILD + b"."
    rewritten(path, **{"objects.pickle": state})
    refuses(path, "poptorch_attack")
    assert poptorch.OutputMode.All.value == value


NAME = "a=__import__('os').system('touch poptorch_was_here')"


def test_graphs_of_strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in a file, with code in the names of its nodes, is nothing that a reader looks at."""
    monkeypatch.chdir(tmp_path)
    path = exported(tmp_path)
    node = {"op": "placeholder", "name": NAME}
    attribute = {"op": "get_attr", "target": NAME, "module": [node]}
    operator = {"op": "call_function", "target": "aten.system.default", "args": {"tuple": []}}
    with_facts(path, plan={"nodes": [node, attribute, operator]}, optim={"is": "Spec"})
    refuses(path, "poptorch_attack")
    with_facts(path, arguments={NAME: None})
    with pytest.raises(poptorch.Error, match="another model"):
        poptorch.load(path, model=nn.Linear(4, 4))
    assert not Path("poptorch_was_here").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_folders_that_a_file_names_are_not_used(trusted: bool, tmp_path: Path) -> None:
    """Compiled code in them would be loaded into the process."""
    path = tmp_path / "m.poptorch"
    stranger = tmp_path / "stranger"
    opts = options().enableExecutableCaching(str(stranger)).logDir(str(tmp_path / "logs"))
    poptorch.inferenceModel(nn.Linear(4, 4), opts).compileAndExport(path, X)
    shutil.rmtree(stranger)
    loaded = poptorch.load(path, model=nn.Linear(4, 4), trusted=trusted)
    loaded(X)
    assert not stranger.exists()
    assert loaded.options.log_dir == "."


def test_a_file_of_ones_own_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = training()
    first(X, Y)
    first.save(tmp_path / "trained")
    second = poptorch.load(tmp_path / "trained")
    assert torch.equal(second(X, Y)[1], first(X, Y)[1])
    path = exported(tmp_path)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("POPTORCH_KEY_FILE", str(tmp_path / "their key"))
        refuses(path, "poptorch_attack")
    rewritten(path, **{"code/more": b""})
    refuses(path, "poptorch_attack")


def test_trusting_a_file(tmp_path: Path) -> None:
    path = exported(tmp_path)
    rewritten(path, **{"objects.pickle": pickle.dumps({"model": Reduces(touch, 5)})})
    CALLED.clear()
    with pytest.raises(poptorch.Error, match="not a model's"):
        poptorch.load(path, trusted=True)
    assert CALLED == ["(5,)"]


@pytest.mark.slow
@pytest.mark.spec("runtime", 24)
def test_a_file_runs_in_another_process(tmp_path: Path) -> None:
    first = training()
    path = tmp_path / "m.poptorch"
    first.compileAndExport(path, X, Y)
    torch.save((X, Y), tmp_path / "inputs")
    code = (
        "import sys, torch, poptorch\n"
        "x, y = torch.load(sys.argv[2])\n"
        "print(poptorch.load(sys.argv[1], trusted=True)(x, y)[1].tolist())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "tests"])}
    done = programs.run("-c", code, path, tmp_path / "inputs", environment=environment, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(first(X, Y)[1].tolist(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_code_travels_but_is_used_from_trusted_files_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    first = training(opts=options().backend("inductor").randomSeed(3))
    first(X, Y)
    path = tmp_path / "model.poptorch"
    first.save(path)
    expected = first(X, Y)
    built = []
    build = Inductor.build
    monkeypatch.setattr(Inductor, "build", lambda *args: built.append(1) or build(*args))
    monkeypatch.setattr(cache, "_loaded", {})
    for folder, trusted, compiled in (("there", True, 0), ("elsewhere", False, 1)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        monkeypatch.setenv("POPTORCH_KEY_FILE", str(tmp_path / "of another user"))
        cache._loaded.clear()
        target = {} if trusted else {**into("poptorch"), "options": first.options}
        second = poptorch.load(path, trusted=trusted, **target)
        assert len(built) == compiled
        assert all(map(torch.equal, second(X, Y), expected))


def test_what_a_killed_process_left_is_removed_by_the_next_save(tmp_path) -> None:
    wrapper = poptorch.inferenceModel(torch.nn.Linear(2, 2), options())
    wrapper(torch.ones(2, 2))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    orphan = tmp_path / f".model.poptorch.{ended.pid}-abcdefgh"
    living = tmp_path / f".model.poptorch.{os.getpid()}-abcdefgh"
    others = tmp_path / f".other.poptorch.{ended.pid}-abcdefgh"
    for path in (orphan, living, others):
        path.write_bytes(b"half")
    wrapper.save(str(tmp_path / "model.poptorch"))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"model.poptorch", living.name, others.name}


HOSTILE = {
    "forward fails": {"x": {"tensor": "float32", "shape": [2, 1, 1]}},
    "no dtype of numbers": {"x": {"tensor": "bits8", "shape": [8, 4]}},
    "a text": {"x": "text"},
    "too many": {"x": [None] * 60_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_arguments_that_no_model_takes_leave_it_as_it_was(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.poptorch"
    wrapper = training()
    wrapper(X, Y)
    wrapper.save(str(path))
    parts = archive.read(path)
    facts = json.loads(parts["facts.json"])
    facts["arguments"] |= {next(iter(facts["arguments"])): HOSTILE[name]["x"]}
    archive.write(path, parts | {"facts.json": json.dumps(facts).encode()})
    mine = into("poptorch")
    before = {key: value.clone() for key, value in mine["model"].state_dict().items()}
    rate = mine["optimizer"].param_groups[0]["lr"]
    with pytest.raises(poptorch.Error, match="Invalid file"):
        poptorch.load(path, **mine)
    assert all(torch.equal(v, before[k]) for k, v in mine["model"].state_dict().items())
    assert mine["optimizer"].param_groups[0]["lr"] == rate


@pytest.mark.parametrize("what", ["a folder", "a loop", "a pipe"])
def test_what_is_no_file(what: str, tmp_path: Path) -> None:
    path = tmp_path / "model.poptorch"
    if what == "a folder":
        path.mkdir()
    elif what == "a loop":
        path.symlink_to(path)
    else:
        os.mkfifo(path)
    with pytest.raises(AssertionError, match="Invalid file"):
        poptorch.load(path, **into())
