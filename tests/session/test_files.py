"""Saved executables: what comes back, what is refused, what is never run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers.models_to_save import Net
from helpers.wrapped import normal, options
from poptorch import ConnectionType
from poptorch._base import archive
from poptorch._compile import code
from poptorch._session import pickles
from poptorch.backends.inductor import Inductor

X, Y = normal(8, 4), normal(8, 4, seed=1)
OPTIMIZERS = {
    "poptorch": lambda p: poptorch.optim.Adam(p, lr=0.01),
    "torch": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def training(optimizer: str = "poptorch", opts: poptorch.Options | None = None):
    model = Net()
    opts = opts or options(accumulation=2).randomSeed(3)
    return poptorch.trainingModel(model, opts, OPTIMIZERS[optimizer](model.parameters()))


@pytest.fixture
def no_capture(monkeypatch):
    """Makes compiling impossible."""

    def refuse():
        raise AssertionError("loading must not compile")

    return lambda: poptorch.registerPreCompileHook(refuse)


@pytest.mark.spec("executor", 40, 53, 62)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loaded_trainer_continues(optimizer: str, tmp_path: Path, no_capture) -> None:
    first = training(optimizer)
    for _ in range(2):
        first(X, Y)
    path = tmp_path / "model.poptorch"
    first.save(path)
    expected = [first(X, Y) for _ in range(3)]
    handle = no_capture()
    try:
        second = poptorch.load(path)
        assert second.isCompiled()
        assert type(second.model).__name__ == "PoptorchNet"
        got = [second(X, Y) for _ in range(3)]
    finally:
        handle.remove()
    for (out, loss), (out_again, loss_again) in zip(expected, got, strict=True):
        assert torch.equal(out, out_again)
        assert torch.equal(loss, loss_again)
    assert second.model.first.weight is second.model.second.weight
    for name, value in first.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name])
    second.setOptimizer(OPTIMIZERS[optimizer](second.model.parameters()))
    second.destroy()
    assert type(second.model) is Net


@pytest.mark.spec("executor", 63)
def test_a_file_from_before_any_run(tmp_path: Path) -> None:
    first = training()
    first.compileAndExport(tmp_path / "m.poptorch", X, Y)
    expected = first(X, Y)
    second = poptorch.load(tmp_path / "m.poptorch")
    assert second.rng_state == [3]
    assert torch.equal(second(X, Y)[0], expected[0])


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
@pytest.mark.spec("runtime", 24, 25)
def test_compiled_without_a_device(tmp_path: Path) -> None:
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

    loaded = poptorch.load(path, edit)
    assert seen == [(ConnectionType.Always, False)]
    assert loaded.options.log_dir == "logs"
    got = loaded(X)
    assert got["mode"] == "mean"
    torch.testing.assert_close(got["out"], model(X)["out"].detach())
    with pytest.raises(poptorch.Error, match="Value mismatch for mode"):
        loaded(X, mode="sum")
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        loaded(X[:4])


@pytest.mark.spec("executor", 43)
def test_files_without_the_model(tmp_path: Path, no_capture) -> None:
    class Local(Net):
        """Not importable by name."""

    model = Local().eval()
    wrapper = poptorch.inferenceModel(model, options())
    with pytest.raises((AttributeError, pickle.PicklingError)):
        wrapper.compileAndExport(tmp_path / "whole.poptorch", X)
    wrapper.save(tmp_path / "m.poptorch", export_model=False)
    with pytest.raises(AssertionError, match=r"(?s)without its model.*loadExecutable"):
        poptorch.load(tmp_path / "m.poptorch")
    other = Local().eval()
    again = poptorch.inferenceModel(other, options())
    handle = no_capture()
    try:
        again.loadExecutable(tmp_path / "m.poptorch")
        out = again(X)["out"]
    finally:
        handle.remove()
    torch.testing.assert_close(out, other(X)["out"].detach())  # the present module's weights
    wrong = poptorch.inferenceModel(nn.Linear(4, 4), options())
    with pytest.raises(poptorch.Error, match="saved from another model"):
        wrong.loadExecutable(tmp_path / "m.poptorch")
    with pytest.raises(poptorch.Error, match="needs trainingModel"):
        poptorch.trainingModel(Local(), options()).loadExecutable(tmp_path / "m.poptorch")


def test_the_optimizer_must_fit_a_loaded_executable(tmp_path: Path) -> None:
    training("torch").compileAndExport(tmp_path / "m.poptorch", X, Y)
    model = Net()
    other = poptorch.trainingModel(model, options(), torch.optim.Adam(model.parameters()))
    with pytest.raises(poptorch.Error, match="type of the optimizer"):
        other.loadExecutable(tmp_path / "m.poptorch")


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
    assert torch.equal(poptorch.load(tmp_path / "m")(X, Y)[1], first(X, Y)[1])


def exported(tmp_path: Path) -> Path:
    path = tmp_path / "m.poptorch"
    poptorch.inferenceModel(nn.Linear(4, 4), options()).compileAndExport(path, X)
    return path


def rewritten(path: Path, **changes: bytes) -> None:
    archive.write(path, {**archive.read(path), **changes})


@pytest.mark.spec("runtime", 26)
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "version", "half"])
def test_damaged_files(damage: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    data = bytearray(path.read_bytes())
    if damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "flipped":
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        torch.save({"a": 1}, path)
    elif damage == "version":
        with zipfile.ZipFile(path) as old:
            parts = {name: old.read(name) for name in old.namelist()}
        header = json.loads(parts[archive.HEADER])
        header.update(format=99, poptorch="9.9.9")
        parts[archive.HEADER] = json.dumps(header).encode()
        with zipfile.ZipFile(path, "w") as new:
            for name, content in parts.items():
                new.writestr(name, content)
    else:
        parts = archive.read(path)
        del parts["objects.pickle"]
        archive.write(path, parts)
    with pytest.raises(AssertionError, match="Invalid file") as caught:
        poptorch.load(path)
    assert isinstance(caught.value, poptorch.Error)
    with pytest.raises(poptorch.Error, match="Invalid file"):
        poptorch.inferenceModel(nn.Linear(4, 4), options()).loadExecutable(path)
    if damage == "version":
        assert "9.9.9" in str(caught.value)
        assert poptorch.__version__ in str(caught.value)


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


class Builds:
    """Pickles as a class, or a function, that gets a state."""

    def __init__(self, target, state) -> None:
        self.target, self.state = target, state


class _Crafting(pickle._Pickler):
    def save(self, obj, save_persistent_id=True):
        if isinstance(obj, Builds):
            super().save(obj.target)
            super().save(obj.state)
            self.write(pickle.BUILD)
        else:
            super().save(obj, save_persistent_id)


def crafted(value: object) -> bytes:
    buffer = io.BytesIO()
    _Crafting(buffer, protocol=4).dump(value)
    return buffer.getvalue()


ATTACKS = {
    "os.system": Reduces(os.system, "true"),
    "a function of the user": Reduces(touch, 1),
    "eval": Reduces(eval, "1"),
    "getattr": Reduces(getattr, "a", "upper"),
    "subprocess": Reduces(subprocess.Popen, ["true"]),
    "torch.load": Reduces(torch.load, "x"),
    "torch.hub": Reduces(torch.hub.load, "x", "y"),
    "a graph module": torch.fx.symbolic_trace(nn.ReLU()),
    "a class that is no module": Reduces(zipfile.ZipFile, "x"),
    "a call of an activation": Reduces(nn.functional.relu, torch.nn.Identity()),
    "a changed class": Builds(nn.Linear, (None, {"forward": nn.Identity})),
    "a changed function": Builds(nn.functional.relu, {"x": 1}),
    "an executor": Reduces(poptorch.PoplarExecutor, 1),
    "a function of ours": Reduces(poptorch.load, "x"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_malicious_files(attack: str, tmp_path: Path) -> None:
    path = exported(tmp_path)
    forward = nn.Linear.forward
    rewritten(path, **{"objects.pickle": crafted({"objects": {"model": ATTACKS[attack]}})})
    CALLED.clear()
    with pytest.raises(poptorch.Error, match=r"(?s)Invalid file.*trusted=True") as caught:
        poptorch.load(path)
    assert CALLED == []
    assert nn.Linear.forward is forward
    named = {"os.system": "system", "eval": "builtins.eval", "torch.load": "torch.serialization"}
    assert named.get(attack, "") in str(caught.value)
    with pytest.raises(poptorch.Error, match="Invalid file"):
        poptorch.inferenceModel(nn.Linear(4, 4), options()).loadExecutable(path)
    assert CALLED == []


def test_calls_of_old_protocols(tmp_path: Path) -> None:
    path = exported(tmp_path)
    rewritten(path, **{"objects.pickle": b"(S'x'\nitorch.nn.functional\nrelu\n."})
    with pytest.raises(poptorch.Error, match="protocol 0"):
        poptorch.load(path)


def test_trusting_a_file() -> None:
    data = pickle.dumps([Reduces(touch, 5)])
    CALLED.clear()
    with pytest.raises(poptorch.Error, match="touch"):
        pickles.load(data, {})
    assert pickles.load(data, {}, trusted=True) == [[]]
    assert CALLED == ["(5,)"]


def test_operators_in_files_are_named(tmp_path: Path) -> None:
    path = exported(tmp_path)
    facts = archive.read(path)["facts.json"].replace(b"aten.addmm.default", b"aten.system.default")
    rewritten(path, **{"facts.json": facts})
    with pytest.raises(poptorch.Error, match=r"operator aten\.system\.default is not registered"):
        poptorch.load(path)


def test_what_models_are_made_of() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    value = {"layer": layer, "dtypes": [torch.float16, torch.Size([2])], "set": {1, 2}, "c": 1j}
    data, tensors = pickles.dump(value)
    again = pickles.load(data, tensors)
    x = torch.randn(1, 3, 8)
    assert torch.equal(again["layer"].eval()(x), layer.eval()(x))
    assert again["dtypes"] == value["dtypes"]
    assert (again["set"], again["c"]) == ({1, 2}, 1j)


@pytest.mark.spec("runtime", 24)
def test_a_file_runs_in_another_process(tmp_path: Path) -> None:
    first = training()
    path = tmp_path / "m.poptorch"
    first.compileAndExport(path, X, Y)
    torch.save((X, Y), tmp_path / "inputs")
    code = (
        "import sys, torch, poptorch\n"
        "x, y = torch.load(sys.argv[2])\n"
        "print(poptorch.load(sys.argv[1])(x, y)[1].tolist())\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(["src", "tests"])}
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(tmp_path / "inputs")],
        capture_output=True, text=True, check=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert json.loads(done.stdout) == pytest.approx(first(X, Y)[1].tolist(), rel=1e-6)


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
    monkeypatch.setattr(code, "_loaded", {})
    for folder, trusted, compiled in (("there", True, 0), ("elsewhere", False, 1)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        code._loaded.clear()
        second = poptorch.load(path, trusted=trusted)
        assert len(built) == compiled
        assert all(map(torch.equal, second(X, Y), expected))
