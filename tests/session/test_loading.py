"""Files that are damaged, or of strangers with right digests: refused, nothing changed or run."""

import json
import os
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import poptorch
from helpers.wrapping import normal, options
from poptorch._base import archive

X = normal(4, 2)
Facts, Tensors = dict[str, Any], dict[str, torch.Tensor]
CALLED: list[str] = []
NAME = "a=__import__('os').system('touch poptorch_was_here')"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.norm(self.layer(x)), "sum")


def made(value: float = 7.0) -> dict[str, Any]:
    """A model with one value in all weights, and its optimizer: what a file is loaded into."""
    model = Net()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return {"model": model, "optimizer": poptorch.optim.Adam(model.parameters(), lr=0.5)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "m"
    target = made(0.25)
    executor = poptorch.trainingModel(target["model"], options(), target["optimizer"])
    executor.compileAndExport(path, X)
    executor.destroy()
    return path.read_bytes()


@pytest.fixture
def path(saved: bytes, tmp_path: Path) -> Path:
    (tmp_path / "m").write_bytes(saved)
    return tmp_path / "m"


def seen(target: dict[str, Any]) -> tuple[Any, ...]:
    """What a refused file must leave as it was."""
    model, optimizer = target["model"], target["optimizer"]
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return type(model), weights, groups, optimizer.loss_scaling


def refused(path: Path, match: Any = None, kind: Any = poptorch.Error, target: Any = None) -> str:
    target = target or made()
    before = seen(target)
    with pytest.raises(kind, match=match) as caught:
        poptorch.load(path, **target)
    assert not isinstance(caught.value.__cause__, MemoryError | OverflowError)
    torch.testing.assert_close(seen(target)[1:], before[1:], rtol=0, atol=0)
    assert type(target["model"]) is Net
    return str(caught.value)


def changed(path: Path, change: Callable[[Facts, Tensors], object]) -> None:
    """Change facts and tensors of a file, and its digests with them."""
    parts = archive.read(path)
    facts = json.loads(parts["facts.json"])
    tensors = safetensors.torch.load(parts["tensors.safetensors"])
    change(facts, tensors)
    new, said = safetensors.torch.save(tensors), json.dumps(facts).encode()
    archive.write(path, parts | {"facts.json": said, "tensors.safetensors": new})


def rewritten(path: Path, **changes: bytes) -> None:
    archive.write(path, {**archive.read(path), **changes})


def fact(**values: object) -> Callable[[Facts, Tensors], None]:
    return lambda facts, _: facts.update(values)


def argument(value: object) -> Callable[[Facts, Tensors], None]:
    return fact(arguments={"x": value})


def hyper(**values: object) -> Callable[[Facts, Tensors], None]:
    return lambda facts, _: facts["hypers"][1].update(values)


def tensor(key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., None]:
    return lambda _, tensors: tensors.update({key: change(tensors[key])})


def opts(call: str) -> Callable[[Facts, Tensors], None]:
    return fact(options=call)


CHANGES = {
    "no names": fact(arguments=[1]),
    "a huge shape": argument({"tensor": "float32", "shape": [1 << 40, 1 << 40]}),
    "a wrong shape": argument({"tensor": "float32", "shape": "44"}),
    "a shape that fails in forward": argument({"tensor": "float32", "shape": [2, 1, 1]}),
    "no dtype of numbers": argument({"tensor": "bits8", "shape": [8, 4]}),
    "an unknown form": argument({"module": "os"}),
    "an unhashable key": argument({"dict": [[[1], 2]]}),
    "too many": argument([None] * 60_000),
    "a parameter that there is not": fact(arguments={"x": None, "self": 1}),
    "no parameter": fact(arguments={}),
    "a number for a shape": lambda f, _: f["shapes"].update(dict.fromkeys(f["shapes"], 3)),
    "another algorithm": fact(algorithm="sgd"),
    "hyper-parameters that are none": fact(hypers=7),
    "a random state that is none": fact(random=["import os"]),
    "complex weights": tensor("model.layer.weight", lambda t: t.to(torch.complex64)),
    "a counter with fractions": tensor("model.norm.num_batches_tracked", torch.Tensor.float),
    "moments of another shape": tensor("device.optstate.first.layer.weight", torch.Tensor.flatten),
    "a rate that is no float": hyper(lr=10**400),
    "a flag that is a rate": hyper(amsgrad=0.5),
    "an anchor that is a text": opts("createOrSet(anchored_tensors={'a': 'b'})"),
    "a location that is a number": opts("TensorLocations.createOrSet(location_weight=1)"),
    "a long text": opts(f"createOrSet(model_name=poptorch.OutputMode.All.name.ljust({1 << 60}))"),
    "JSON": opts("from_json('{}')"),
    "an import": opts("deviceIterations(__import__('os').system('true'))"),
    "a private name": opts("_freeze()"),
    "depth": opts("deviceIterations(" + "(" * 5000 + ")" * 5000 + ")"),
    "a method that reads": opts("loadFromFile('pipe')"),
    "a rate below zero": hyper(lr=-0.5),  # it would train uphill, without a word
    "no number": hyper(lr=float("nan")),
    "a rate too large": hyper(lr=1e308),
    "a scale too large": lambda facts, _: facts["hypers"][0].update(loss_scaling=1e308),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_stranger_says_is_refused_and_nothing_has_changed(change, path, monkeypatch) -> None:
    monkeypatch.chdir(path.parent)
    os.mkfifo("pipe")  # whoever opens it waits for ever
    changed(path, CHANGES[change])
    refused(path)


def test_folders_in_options_of_strangers(path: Path) -> None:
    folder = path.with_name("stranger")
    calls = f"createOrSet(log_dir='{folder}')\nenableExecutableCaching('{folder}')"
    changed(path, opts(calls))
    refused(path, match=r"no option: options\.enableExecutableCaching")
    changed(path, opts(calls.splitlines()[0]))
    assert poptorch.load(path, **made()).options.log_dir == "."
    assert not folder.exists()


def test_weights_that_cannot_be_put_leave_the_others_as_they_were(path: Path) -> None:
    target = made()
    target["model"].norm.running_var = torch.ones(1).expand(2)  # two numbers in one place
    refused(path, "single memory location", RuntimeError, target)
    changed(path, lambda _, tensors: tensors.update({"model.\x1b[2Jwell\u202e": torch.zeros(1)}))
    said = refused(path, match=r"\\x1b\[2Jwell")  # names give a terminal no commands
    assert "\x1b" not in said
    assert "\u202e" not in said


def packed(path: Path, parts: dict[str, bytes], kind: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", kind) as new:
        for name, content in parts.items():
            new.writestr(name, content)


def unpacked(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as old:
        return {name: old.read(name) for name in old.namelist()}


def another_version(path: Path) -> None:
    parts = unpacked(path)
    header = {**json.loads(parts[archive.HEADER]), "format": 99, "poptorch": "9.9.9"}
    packed(path, {**parts, archive.HEADER: json.dumps(header).encode()})


def instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda path: (path.unlink(), make(path))


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


def deep(depth: int) -> Callable[[Path], None]:
    facts = b'{"arguments": ' + b"[" * depth + b"]" * depth + b"}"
    return lambda path: rewritten(path, **{"facts.json": facts})


DAMAGES = {
    "foreign": lambda path: torch.save({"a": 1}, path), "another version": another_version,
    "no parts": lambda path: archive.write(path, {}), "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir), "a loop": instead(lambda path: path.symlink_to(path)),
    "compressed": lambda path: packed(path, unpacked(path), zipfile.ZIP_DEFLATED),
    "overlapping": overlapping, "twice": twice, "deep facts": deep(900),
    "deeper facts": deep(100_000),
}  # fmt: skip


@pytest.mark.spec("runtime", 26)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, path: Path) -> None:
    trainer = poptorch.trainingModel(options=options(), **made())
    DAMAGES[damage](path)
    said = refused(path, "Invalid file", AssertionError)
    for read in (lambda: poptorch.load(path, trusted=True), lambda: trainer.loadExecutable(path)):
        with pytest.raises(poptorch.Error, match="Invalid file"):
            read()
    assert damage != "another version" or ("9.9.9" in said and poptorch.__version__ in said)
    path.unlink() if path.is_file() else path.rename(path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        poptorch.load(path)


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


def runs_nothing(path: Path) -> None:
    """As data it is read, or it is refused."""
    CALLED.clear()
    said = r"(?s)not trusted.*test_loading\.py.*model=Net.*trusted=True"
    with pytest.raises(poptorch.Error, match=said):
        poptorch.load(path)
    poptorch.load(path, **made())(X)
    poptorch.trainingModel(options=options(), **made()).loadExecutable(path)
    assert CALLED == []
    assert "poptorch_attack" not in sys.modules


ENUM = (poptorch.OutputMode.All, {"_value_": 5})
PICKLES = {
    "a function": pickle.dumps(Reduces(touch, 1)),
    "a module that is imported": b"cpoptorch_attack\nrun\n.",
    "a call of protocol 0": b"(S'x'\nihelpers.models_to_save\nNet\n.",
    "a class of torch_geometric": b"ctorch_geometric.nn.models.glem\nGLEM\n(S'/tmp'\ntR.",
    "an endless container": pickle.dumps(Reduces(range, 1 << 40)),
    "another value of an enum": pickle.dumps(ENUM)[:-1] + pickle.BUILD + b".",
}


@pytest.mark.parametrize("attack", PICKLES)
def test_pickles_of_strangers(attack: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.with_name("poptorch_attack.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(path.parent)
    rewritten(path, **{"objects.pickle": PICKLES[attack]})
    before, value = set(sys.modules), poptorch.OutputMode.All.value
    runs_nothing(path)
    assert not [name for name in {*sys.modules} - before if name.startswith("torch_geometric")]
    assert poptorch.OutputMode.All.value == value


def test_graphs_of_strangers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan in a file, with code in the names of its nodes, is nothing that a reader looks at."""
    monkeypatch.chdir(path.parent)
    node = {"op": "placeholder", "name": NAME}
    attribute = {"op": "get_attr", "target": NAME, "module": [node]}
    operator = {"op": "call_function", "target": "aten.system.default", "args": {"tuple": []}}
    changed(path, fact(plan={"nodes": [node, attribute, operator]}, optim={"is": "Spec"}))
    runs_nothing(path)
    changed(path, fact(arguments={NAME: None}))
    refused(path, match="another model")
    assert not Path("poptorch_was_here").exists()


@pytest.mark.slow
def test_a_file_of_ones_own_is_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = poptorch.trainingModel(options=options(), **made())
    first(X)
    own = path.with_name("trained")
    first.save(own)
    assert torch.equal(poptorch.load(own)(X), first(X))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("POPTORCH_KEY_FILE", str(path.with_name("their key")))
        runs_nothing(path)
    rewritten(path, **{"code/more": b""})
    runs_nothing(path)
    rewritten(path, **{"objects.pickle": pickle.dumps({"model": Reduces(touch, 5)})})
    CALLED.clear()
    with pytest.raises(poptorch.Error, match="not a model's"):
        poptorch.load(path, trusted=True)
    assert CALLED == ["(5,)"]
