"""Saved executables: what comes back, and what they must fit."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.closeness import relative
from helpers.models_to_save import Net
from helpers.source_tree import ROOT
from helpers.wrapping import Calling, Having, normal, options
from poptorch._base import archive
from poptorch._compile import cache
from poptorch.backends.inductor import Inductor

X, Y = normal(8, 4), normal(8, 4, seed=1)
OPTIMIZERS = {"poptorch": lambda p: poptorch.optim.Adam(p, lr=0.01),
              "torch": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)}  # fmt: skip


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
@pytest.mark.parametrize(
    "backend, optimizer, trusted", [("reference", "poptorch", False), ("staged", "torch", True)]
)
def test_a_loaded_trainer_continues(backend: str, optimizer: str, trusted: bool, tmp_path) -> None:
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
    torch.testing.assert_close([second(X, Y) for _ in range(3)], expected, rtol=0, atol=0)
    assert second.model.first.weight is second.model.second.weight
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    second.setOptimizer(OPTIMIZERS[optimizer](second.model.parameters()))
    second.destroy()
    assert type(second.model) is Net


@pytest.mark.slow
@pytest.mark.spec("executor", 63)
@pytest.mark.spec("runtime", 24)
def test_hyper_parameters_come_from_a_file_from_before_any_run(tmp_path, caplog) -> None:
    first, path = training(), tmp_path / "m.poptorch"
    first.setOptimizer(poptorch.optim.Adam(first.model.parameters(), lr=0.5, loss_scaling=4.0))
    first.compileAndExport(path, X, Y)
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1, loss_scaling=2.0)
    second = poptorch.load(path, options=first.options, model=model, optimizer=optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.loss_scaling) == (0.5, 4.0)
    assert second.plan().describe() == first.plan().describe()
    expected = first(X, Y)
    for again in (second, poptorch.load(path, trusted=True)):
        assert again.rng_state == [3]
        assert torch.equal(again(X, Y)[0], expected[0])
    assert "other settings" not in caplog.text
    poptorch.load(path, options=options(accumulation=4), **into("poptorch"))
    assert "loops.accumulation: 4 here, 2 there" in caplog.text
    torch.save((X, Y), tmp_path / "inputs")
    code = (  # in another process
        "import sys, torch, poptorch\n"
        "x, y = torch.load(sys.argv[2])\n"
        "print(poptorch.load(sys.argv[1], trusted=True)(x, y)[1].tolist())\n"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths}
    done = programs.run("-c", code, path, tmp_path / "inputs", environment=environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(expected[1].tolist(), rel=relative(8))


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
@pytest.mark.spec("runtime", 24, 25)
def test_compiled_without_a_device(tmp_path, caplog) -> None:
    model = Net().eval()
    offline = poptorch.inferenceModel(model, options(iterations=2).useOfflineIpuTarget(21))
    path = tmp_path / "m.poptorch"
    offline.compileAndExport(path, X)
    assert not offline.isAttachedToDevice()
    seen = []

    def edit(opts: poptorch.Options) -> str:
        seen.append((opts.connection_type, opts.exists("ipu_version")))
        opts.logDir("logs").connectionType(poptorch.ConnectionType.OnDemand)
        return "ignored"

    loaded = poptorch.load(path, edit, trusted=True)
    assert seen == [(poptorch.ConnectionType.Always, False)]
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
def test_files_without_the_model(tmp_path, caplog: pytest.LogCaptureFixture) -> None:
    class Local(Net):
        """Not importable by name."""

    def wrapped() -> poptorch.PoplarExecutor:
        return poptorch.inferenceModel(Local().eval(), options())

    wrapper, whole, alone = wrapped(), tmp_path / "whole", tmp_path / "alone"
    wrapper.compileAndExport(whole, X)
    assert "The model cannot be pickled" in caplog.text
    with pytest.raises(poptorch.Error, match=r"holds no objects"):
        poptorch.load(whole, trusted=True)
    assert torch.equal(poptorch.load(whole, model=Local().eval())(X)["out"], wrapper(X)["out"])
    wrapper.save(alone, export_model=False)
    with pytest.raises(AssertionError, match=r"(?s)without its model.*loadExecutable"):
        poptorch.load(alone)
    again = wrapped()
    again.loadExecutable(alone)
    assert again.isCompiled()
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        again(X[:4])
    expected = again.model(X)["out"].detach()  # of the present module's weights
    torch.testing.assert_close(again(X)["out"], expected)
    wrong = Local().eval()
    wrong.second.bias = None
    for executor, said in (
        (poptorch.inferenceModel(wrong, options()), r"another model(?s:.)*second.bias: \(4,\) in"),
        (poptorch.trainingModel(Local(), options()), "needs trainingModel"),
    ):
        with pytest.raises(poptorch.Error, match=said):
            executor.loadExecutable(alone)


@pytest.mark.slow
def test_what_is_loaded_into_must_fit(tmp_path) -> None:
    path = tmp_path / "m.poptorch"
    training("torch").compileAndExport(path, X, Y)
    target, linear = into("torch"), nn.Linear(4, 4)
    before = {name: value.clone() for name, value in target["model"].state_dict().items()}
    other = {"model": linear, "optimizer": OPTIMIZERS["torch"](linear.parameters())}
    for given, said in (
        ({"model": target["model"]}, r"(?s)compiled for training.*optimizer=SGD"),
        (other, r"(?s)another model.*bias: None in the file"),
        ({**target, "loss": nn.MSELoss()}, "Superfluous loss"),
    ):
        with pytest.raises(poptorch.Error, match=said):
            poptorch.load(path, **given)
    torch.testing.assert_close(target["model"].state_dict(), before, rtol=0, atol=0)
    assert type(target["model"]) is Net
    trainer = poptorch.trainingModel(options=options(), **target)
    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.load(path, **target)
    torch.testing.assert_close(target["model"].state_dict(), before, rtol=0, atol=0)
    trainer.destroy()
    assert type(target["model"]) is Net
    trainer = poptorch.trainingModel(options=options(), **into("poptorch"))
    with pytest.raises(poptorch.Error, match=r"(?s)another optimizer.*sgd in the file, adam here"):
        trainer.loadExecutable(path)
    trainer = poptorch.trainingModel(Net(), options())  # SGD, as in the file
    trainer.loadExecutable(path)
    assert trainer.isCompiled()


def test_what_cannot_be_compiled_for_while_loading(tmp_path) -> None:
    """Made-up arguments would freeze the wrong branch; a type of the user's is not in the file."""
    path, layer, positive = tmp_path / "m.poptorch", nn.Linear(4, 4), X.abs()
    depends = Calling(lambda x, _=None: layer(x) if x.sum() > 0 else x)
    first = poptorch.inferenceModel(depends, options())
    first.compileAndExport(path, positive)
    second = poptorch.load(path, model=depends)
    assert not second.isCompiled()
    assert torch.equal(second(positive), first(positive))
    takes = Calling(lambda x, _=None: layer(x))
    poptorch.inferenceModel(takes, options()).compileAndExport(path, X, object())
    assert not poptorch.load(path, model=takes).isCompiled()
    poptorch.inferenceModel(takes, options()).compileAndExport(path, X)
    with pytest.raises(poptorch.Error, match="depends on the values of its inputs"):
        poptorch.load(path, model=depends)


def test_arguments_of_plain_types(tmp_path) -> None:
    value = [None, True, 3, 2.5, "text", torch.float16, (2.0, {"a": X})]

    def made() -> nn.Module:
        return Calling(lambda x, *more, flag=None, **named: (x + len(more), flag, named))

    first, path = poptorch.inferenceModel(made(), options()), tmp_path / "m"
    first.compileAndExport(path, X, X, flag=value, other=X)
    second = poptorch.load(path, model=made())
    assert second.isCompiled()
    assert torch.equal(second(X, X, flag=value, other=X)[0], X + 1)


@pytest.mark.slow
def test_options_come_from_the_file(tmp_path) -> None:
    opts = options(accumulation=4).outputMode(poptorch.OutputMode.Sum).randomSeed(7)
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.Stage("a"), poptorch.Stage("b")))
    opts.Precision.enableStochasticRounding(True)
    opts.logDir(str(tmp_path)).enableExecutableCaching(str(tmp_path / "cache"))

    def made() -> dict:
        model = nn.Sequential(nn.Linear(4, 4), Net())
        poptorch.BeginBlock(model[0], "a")
        poptorch.BeginBlock(model[1], "b")
        target = Having(lambda m, x, y: m.inner[1](m.inner[0](x), y), inner=model)
        return {"model": target, "optimizer": OPTIMIZERS["torch"](target.parameters())}

    first = poptorch.trainingModel(options=opts, **made())
    first.compileAndExport(tmp_path / "m", X, Y)
    expected = first(X, Y)[1]
    shutil.rmtree(tmp_path / "cache")
    assert "cache" in repr(first.options)
    for trusted in (False, True):
        second = poptorch.load(tmp_path / "m", trusted=trusted, **made())
        assert "cache" not in repr(second.options)
        assert second.options.log_dir == "."
        assert second.options.output_mode == poptorch.OutputMode.Sum
        assert second.plan().describe() == first.plan().describe()
        assert torch.equal(second(X, Y)[1], expected)
        assert not (tmp_path / "cache").exists()  # code in it would get into the process


@pytest.mark.spec("executor", 44)
def test_where_files_go_and_what_is_not_in_them(tmp_path, caplog) -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        wrapper.save(tmp_path / "early.poptorch")
    marked = torch.full((2, 4), 1234.5)
    wrapper(marked)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed, living, other = (
        tmp_path / f".{name}.poptorch.{archive._host()}-{pid}-abcdefgh"
        for name, pid in (("model", ended.pid), ("model", os.getpid()), ("other", ended.pid))
    )
    for path in (killed, living, other):
        path.write_bytes(b"half")
    wrapper.save(tmp_path)
    assert "is a directory" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"model.poptorch", living.name, other.name}
    content = (tmp_path / "model.poptorch").read_bytes()
    assert wrapper.model.weight.detach().numpy().tobytes() in content
    assert marked[:1].numpy().tobytes() not in content  # no values of the arguments
    wrapper.save(tmp_path / "new" / "dir" / "x.poptorch")
    assert [path.name for path in (tmp_path / "new" / "dir").iterdir()] == ["x.poptorch"]
    with pytest.raises(AssertionError, match="folder that is a file"):
        wrapper.save(tmp_path / "model.poptorch" / "x.poptorch")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_code_travels_but_is_used_from_trusted_files_only(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    first = poptorch.inferenceModel(nn.Linear(4, 4), options().backend("inductor"))
    expected = first(X)
    path = tmp_path / "model.poptorch"
    first.save(path)
    built = []
    build = Inductor.build
    monkeypatch.setattr(Inductor, "build", lambda *args: built.append(1) or build(*args))
    monkeypatch.setattr(cache, "_loaded", {})
    for folder, trusted, compiled in (("there", True, 0), ("elsewhere", False, 1)):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / folder))
        monkeypatch.setenv("POPTORCH_KEY_FILE", str(tmp_path / "of another user"))
        cache._loaded.clear()
        target = {} if trusted else {"model": nn.Linear(4, 4), "options": first.options}
        second = poptorch.load(path, trusted=trusted, **target)
        assert len(built) == compiled
        assert torch.equal(second(X), expected)
