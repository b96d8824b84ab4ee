"""Saved executables: what comes back and must fit; files that are damaged, or of strangers."""

import copy
import json
import os
import pickle
import shutil
import stat
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import poptorch
from helpers import programs, users
from helpers.closeness import relative
from helpers.models_to_save import Net
from helpers.source_tree import ROOT
from helpers.wrapping import Calling, Having, normal, options
from poptorch._base import archive
from poptorch._compile import cache
from poptorch._cpu import Inductor

X, Y = normal(8, 4), normal(8, 4, seed=1)
OPTIMIZERS = {
    "poptorch": lambda p: poptorch.optim.Adam(p, lr=0.01),
    "torch": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
}


def into(optimizer: str | None = None) -> dict[str, Any]:
    """Return the arguments with which ``poptorch.load`` loads a saved Net."""
    torch.manual_seed(99)
    model = Net()
    chosen = None if optimizer is None else OPTIMIZERS[optimizer](model.parameters())
    return {"model": model, "optimizer": chosen}


def training(
    optimizer: str = "poptorch", opts: poptorch.Options | None = None
) -> poptorch.PoplarExecutor:
    """Return a wrapped Net."""
    model, opts = Net(), opts or options(accumulation=2).randomSeed(3)
    return poptorch.trainingModel(model, opts, OPTIMIZERS[optimizer](model.parameters()))


@pytest.mark.slow
@pytest.mark.spec("executor", 40, 53, 62)
@pytest.mark.parametrize(
    "backend, optimizer, trusted", [("reference", "poptorch", False), ("staged", "torch", True)]
)
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
    torch.testing.assert_close([second(X, Y) for _ in range(3)], expected, rtol=0, atol=0)
    assert second.model.first.weight is second.model.second.weight
    torch.testing.assert_close(second.model.state_dict(), first.model.state_dict(), rtol=0, atol=0)
    second.setOptimizer(OPTIMIZERS[optimizer](second.model.parameters()))
    second.destroy()
    assert type(second.model) is Net


@pytest.fixture
def exported(tmp_path: Path) -> tuple[poptorch.PoplarExecutor, Path]:
    """Return a trainer that was compiled and never run, and its file."""
    first, path = training(), tmp_path / "m.poptorch"
    first.setOptimizer(poptorch.optim.Adam(first.model.parameters(), lr=0.5, loss_scaling=4.0))
    first.compileAndExport(path, X, Y)
    return first, path


Exported = tuple[poptorch.PoplarExecutor, Path]


def into_scaled_adam() -> dict[str, Any]:
    """Return a model and an optimizer that scales losses, with other numbers than the file."""
    model = Net()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1, loss_scaling=2.0)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.larger("test_a_file_from_before_any_run_begins_with_the_same_program_seed_and_weights")
@pytest.mark.spec("executor", 63)
@pytest.mark.spec("runtime", 24)
def test_hyper_parameters_come_from_a_file_from_before_any_run(exported: Exported) -> None:
    first, path = exported
    target = into_scaled_adam()
    optimizer = target["optimizer"]

    poptorch.load(path, options=first.options, **target)

    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.loss_scaling == 4.0


@pytest.mark.slow
@pytest.mark.spec("executor", 63)
@pytest.mark.spec("runtime", 24)
@pytest.mark.parametrize("trusted", [False, True])
def test_a_file_from_before_any_run_begins_with_the_same_program_seed_and_weights(
    trusted: bool, exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    first, path = exported
    target = {} if trusted else {"options": first.options, **into_scaled_adam()}

    second = poptorch.load(path, trusted=trusted, **target)

    assert second.plan().describe() == first.plan().describe()
    assert second.rng_state == [3]
    assert torch.equal(second(X, Y)[0], first(X, Y)[0])
    assert "settings that differ" not in caplog.text


@pytest.mark.slow
@pytest.mark.spec("executor", 63)
@pytest.mark.spec("runtime", 24)
def test_a_warning_lists_options_that_differ_from_those_of_the_file(
    exported: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = exported

    poptorch.load(path, options=options(accumulation=4), **into("poptorch"))

    assert "loops.accumulation: 4 here, 2 there" in caplog.text


@pytest.mark.slow
@pytest.mark.spec("executor", 63)
@pytest.mark.spec("runtime", 24)
def test_a_file_is_loaded_in_another_process(exported: Exported, tmp_path: Path) -> None:
    first, path = exported
    torch.save((X, Y), tmp_path / "inputs")
    code = (
        "import sys, torch, poptorch\n"
        "x, y = torch.load(sys.argv[2])\n"
        "print(poptorch.load(sys.argv[1], trusted=True)(x, y)[1].tolist())\n"
    )
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
    environment = {**os.environ, "PYTHONPATH": paths}

    done = programs.run("-c", code, path, tmp_path / "inputs", environment=environment)

    _, expected = first(X, Y)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == pytest.approx(expected.tolist(), rel=relative(8))


@pytest.fixture(scope="module")
def compiled_offline(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """Return a model that was compiled without a device, and its file."""
    opts = options(iterations=2).useOfflineIpuTarget(21)
    path = tmp_path_factory.mktemp("offline") / "m.poptorch"
    offline = poptorch.inferenceModel(Net().eval(), opts)
    offline.compileAndExport(path, X)
    return offline, path


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
@pytest.mark.spec("runtime", 24, 25)
def test_a_model_can_be_compiled_and_exported_without_a_device(compiled_offline: Exported) -> None:
    offline, path = compiled_offline

    assert path.is_file()
    assert not offline.isAttachedToDevice()


def on_demand(opts: poptorch.Options) -> str:
    """Edit options; what is returned is ignored."""
    opts.logDir("logs").connectionType(poptorch.ConnectionType.OnDemand)
    return "ignored"


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
@pytest.mark.spec("runtime", 24, 25)
def test_a_model_that_was_compiled_without_a_device_has_one_after_loading(
    compiled_offline: Exported,
) -> None:
    _, path = compiled_offline
    seen = []

    def look(opts: poptorch.Options) -> None:
        seen.append((opts.connection_type, opts.exists("ipu_version")))

    poptorch.load(path, look, trusted=True)

    assert seen == [(poptorch.ConnectionType.Always, False)]


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("options", 38)
def test_options_can_be_edited_when_a_model_is_loaded(
    compiled_offline: Exported, caplog: pytest.LogCaptureFixture
) -> None:
    _, path = compiled_offline

    loaded = poptorch.load(path, on_demand, trusted=True)

    assert loaded.options.log_dir == "logs"
    assert "settings that differ" not in caplog.text


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("runtime", 24, 25)
def test_a_loaded_model_computes_the_same_as_eager_pytorch(compiled_offline: Exported) -> None:
    offline, path = compiled_offline

    got = poptorch.load(path, on_demand, trusted=True)(X)

    assert got["mode"] == "mean"
    torch.testing.assert_close(got["out"], offline.model(X)["out"].detach())


def on_demand_for_one_shape(opts: poptorch.Options) -> None:
    """Edit options."""
    opts.connectionType(poptorch.ConnectionType.OnDemand).programs(1)


@pytest.mark.spec("executor", 42)
@pytest.mark.spec("runtime", 24, 25)
def test_a_loaded_model_refuses_other_arguments(compiled_offline: Exported) -> None:
    _, path = compiled_offline
    loaded = poptorch.load(path, on_demand_for_one_shape, trusted=True)

    with pytest.raises(poptorch.Error, match="Value mismatch for mode"):
        loaded(X, mode="sum")
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        loaded(torch.cat([X, X]))


def local_model() -> nn.Module:
    """Return a model whose class cannot be imported by name."""

    class Local(Net): ...

    return Local().eval()


@pytest.mark.spec("executor", 43)
def test_a_model_that_cannot_be_pickled_is_left_out_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    poptorch.inferenceModel(local_model(), options()).compileAndExport(tmp_path / "whole", X)

    assert "The model cannot be pickled" in caplog.text
    with pytest.raises(poptorch.Error, match=r"does not contain the model object"):
        poptorch.load(tmp_path / "whole", trusted=True)


@pytest.mark.spec("executor", 43)
def test_a_file_without_a_model_is_loaded_into_a_model(tmp_path: Path) -> None:
    wrapper = poptorch.inferenceModel(local_model(), options())
    wrapper.compileAndExport(tmp_path / "whole", X)

    loaded = poptorch.load(tmp_path / "whole", model=local_model())

    assert torch.equal(loaded(X)["out"], wrapper(X)["out"])


@pytest.fixture(scope="module")
def executable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a program that was saved without its model."""
    path = tmp_path_factory.mktemp("executable") / "alone"
    wrapper = poptorch.inferenceModel(local_model(), options())
    wrapper.compile(X)
    wrapper.save(path, export_model=False)
    return path


@pytest.mark.spec("executor", 43)
def test_a_program_that_was_saved_without_its_model_is_not_for_load(executable: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)without its model.*loadExecutable"):
        poptorch.load(executable)


@pytest.mark.spec("executor", 43)
def test_a_program_runs_with_the_weights_of_the_model_that_it_is_loaded_into(
    executable: Path,
) -> None:
    second = poptorch.inferenceModel(local_model(), options())

    second.loadExecutable(executable)

    assert second.isCompiled()
    torch.testing.assert_close(second(X)["out"], second.model(X)["out"].detach())


@pytest.mark.spec("executor", 43)
def test_a_loaded_program_refuses_other_shapes(executable: Path) -> None:
    second = poptorch.inferenceModel(local_model(), options().programs(1))
    second.loadExecutable(executable)

    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        second(torch.cat([X, X]))


@pytest.mark.spec("executor", 43)
def test_a_program_of_another_model_is_refused(executable: Path) -> None:
    other = local_model()
    other.second.bias = None

    with pytest.raises(poptorch.Error, match=r"another model(?s:.)*second.bias: \(4,\) in"):
        poptorch.inferenceModel(other, options()).loadExecutable(executable)


@pytest.mark.spec("executor", 43)
def test_a_program_for_inference_is_refused_for_training(executable: Path) -> None:
    with pytest.raises(poptorch.Error, match="cannot replace each other"):
        poptorch.trainingModel(local_model().train(), options()).loadExecutable(executable)


@pytest.fixture(scope="module")
def trained_by_sgd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the file of a model that torch's SGD trains."""
    path = tmp_path_factory.mktemp("sgd") / "m.poptorch"
    training("torch").compileAndExport(path, X, Y)
    return path


def another_layer() -> dict[str, Any]:
    """Return a model of one layer with its optimizer."""
    linear = nn.Linear(4, 4)
    return {"model": linear, "optimizer": OPTIMIZERS["torch"](linear.parameters())}


@pytest.mark.slow
@pytest.mark.parametrize(
    "given, message",
    [
        pytest.param(
            lambda target: {"model": target["model"]},
            r"(?s)compiled for training.*optimizer=SGD",
            id="no optimizer",
        ),
        pytest.param(
            lambda target: another_layer(),
            r"(?s)another model.*bias: None in the file",
            id="another model",
        ),
        pytest.param(
            lambda target: {**target, "loss": nn.MSELoss()},
            "saved without a loss",
            id="a loss",
        ),
    ],
)
def test_a_file_must_fit_the_model_or_nothing_changes(
    given: Callable[[dict[str, Any]], dict[str, Any]], message: str, trained_by_sgd: Path
) -> None:
    target = into("torch")
    before = {name: value.clone() for name, value in target["model"].state_dict().items()}

    with pytest.raises(poptorch.Error, match=message):
        poptorch.load(trained_by_sgd, **given(target))

    torch.testing.assert_close(target["model"].state_dict(), before, rtol=0, atol=0)
    assert type(target["model"]) is Net


@pytest.mark.slow
def test_a_file_is_not_loaded_into_a_model_that_is_wrapped(trained_by_sgd: Path) -> None:
    target = into("torch")
    before = {name: value.clone() for name, value in target["model"].state_dict().items()}
    trainer = poptorch.trainingModel(options=options(), **target)

    with pytest.raises(RuntimeError, match="already been wrapped"):
        poptorch.load(trained_by_sgd, **target)

    torch.testing.assert_close(target["model"].state_dict(), before, rtol=0, atol=0)
    trainer.destroy()
    assert type(target["model"]) is Net


@pytest.mark.slow
def test_a_program_with_the_step_of_another_optimizer_is_refused(trained_by_sgd: Path) -> None:
    trainer = poptorch.trainingModel(options=options(), **into("poptorch"))

    with pytest.raises(
        poptorch.Error, match=r"(?s)another optimizer.*sgd in the file, adam in this model"
    ):
        trainer.loadExecutable(trained_by_sgd)


@pytest.mark.slow
def test_a_program_of_sgd_is_loaded_into_a_model_without_an_optimizer(
    trained_by_sgd: Path,
) -> None:
    """It is trained by SGD."""
    trainer = poptorch.trainingModel(Net(), options())

    trainer.loadExecutable(trained_by_sgd)

    assert trainer.isCompiled()


def test_loading_does_not_compile_for_arguments_that_are_not_in_the_file(tmp_path: Path) -> None:
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


def test_arguments_of_plain_types_are_saved_and_loaded(tmp_path: Path) -> None:
    value = [None, True, 3, 2.5, "text", torch.float16, (2.0, {"a": X})]

    def made() -> nn.Module:
        return Calling(lambda x, *more, flag=None, **named: (x + len(more), flag, named))

    first, path = poptorch.inferenceModel(made(), options()), tmp_path / "m"
    first.compileAndExport(path, X, X, flag=value, other=X)
    second = poptorch.load(path, model=made())
    assert second.isCompiled()
    assert torch.equal(second(X, X, flag=value, other=X)[0], X + 1)


@pytest.mark.slow
def test_options_come_from_the_file(tmp_path: Path) -> None:
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
def test_a_saved_file_has_the_default_name_and_no_values_of_inputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        wrapper.save(tmp_path / "early.poptorch")
    marked = torch.full((2, 4), 1234.5)
    wrapper(marked)
    wrapper.save(tmp_path)
    assert "is a directory" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["model.poptorch"]
    content = (tmp_path / "model.poptorch").read_bytes()
    assert wrapper.model.weight.detach().numpy().tobytes() in content
    assert marked[:1].numpy().tobytes() not in content  # no values of the arguments
    wrapper.save(tmp_path / "new" / "dir" / "x.poptorch")
    assert [path.name for path in (tmp_path / "new" / "dir").iterdir()] == ["x.poptorch"]
    with pytest.raises(AssertionError, match="a part of the path is a file"):
        wrapper.save(tmp_path / "model.poptorch" / "x.poptorch")


def test_a_save_writes_the_file_that_the_users_link_leads_to(tmp_path: Path) -> None:
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    wrapper(torch.ones(2, 4))
    (tmp_path / "disk").mkdir()
    link = tmp_path / "latest.poptorch"
    link.symlink_to("disk/first.poptorch")
    wrapper.save(link)
    assert link.is_symlink()
    assert archive.read(tmp_path / "disk" / "first.poptorch")


PLANT = """
import os, sys
folder, mine = sys.argv[1:]
os.symlink(mine, os.path.join(folder, "model.poptorch"))
"""


def test_a_save_does_not_follow_a_link_of_another_user(tmp_path: Path) -> None:
    """Anybody may make links in a folder such as /tmp."""
    for parent in (tmp_path, *tmp_path.parents):
        if parent.stat().st_uid == os.getuid() and not parent.stat().st_mode & stat.S_IXOTH:
            parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    mine, folder = tmp_path / "mine", tmp_path / "common"
    mine.write_text("mine")
    folder.mkdir()
    folder.chmod(0o1777)
    users.run(PLANT, str(folder), str(mine))
    wrapper = poptorch.inferenceModel(nn.Linear(4, 4), options())
    wrapper(torch.ones(2, 4))
    with pytest.raises(PermissionError, match="a link that belongs to another user"):
        wrapper.save(folder / "model.poptorch")
    assert mine.read_text() == "mine"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
def test_compiled_code_is_saved_with_the_model_and_used_only_if_the_file_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "here"))
    first = poptorch.inferenceModel(nn.Linear(4, 4), options().backend("inductor"))
    expected, path = first(X), tmp_path / "model.poptorch"
    first.save(path)
    built, build = [], Inductor.build
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


Z = normal(4, 2)
Facts, Tensors = dict[str, Any], dict[str, torch.Tensor]
CALLED: list[str] = []
NAME = "a=__import__('os').system('touch poptorch_was_here')"


class Stranger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.norm(self.layer(x)), "sum")


def made(value: float = 7.0) -> dict[str, Any]:
    """A model with one value in all weights, and its optimizer: what a file is loaded into."""
    model = Stranger()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return {"model": model, "optimizer": poptorch.optim.Adam(model.parameters(), lr=0.5)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path, target = tmp_path_factory.mktemp("saved") / "m", made(0.25)
    executor = poptorch.trainingModel(target["model"], options(), target["optimizer"])
    executor.compileAndExport(path, Z)
    executor.destroy()
    return path.read_bytes()


@pytest.fixture
def path(saved: bytes, tmp_path: Path) -> Path:
    (tmp_path / "m").write_bytes(saved)
    return tmp_path / "m"


def seen(target: dict[str, Any]) -> tuple[Any, ...]:
    """Return the state that a refused file must not change."""
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
    assert type(target["model"]) is Stranger
    return str(caught.value)


def changed(path: Path, change: Callable[[Facts, Tensors], object]) -> None:
    """Change facts and tensors of a file, and its digests with them."""
    parts = archive.read(path)
    facts = json.loads(parts["facts.json"])
    tensors = safetensors.torch.load(parts["tensors.safetensors"])
    change(facts, tensors)
    new, encoded = safetensors.torch.save(tensors), json.dumps(facts).encode()
    archive.write(path, parts | {"facts.json": encoded, "tensors.safetensors": new})


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
def test_malicious_files_are_refused_and_change_nothing(
    change: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(path.parent)
    os.mkfifo("pipe")  # whoever opens it waits for ever
    changed(path, CHANGES[change])
    refused(path)


def test_options_in_untrusted_files_cannot_choose_folders(path: Path) -> None:
    folder = path.with_name("stranger")
    calls = f"createOrSet(log_dir='{folder}')\nenableExecutableCaching('{folder}')"
    changed(path, opts(calls))
    refused(path, match=r"no such option: options\.enableExecutableCaching")
    changed(path, opts(calls.splitlines()[0]))
    assert poptorch.load(path, **made()).options.log_dir == "."
    assert not folder.exists()


def test_weights_that_cannot_be_put_leave_the_others_as_they_were(path: Path) -> None:
    target = made()
    target["model"].norm.running_var = torch.ones(1).expand(2)  # two numbers in one place
    refused(path, "single memory location", RuntimeError, target)
    changed(path, lambda _, tensors: tensors.update({"model.\x1b[2Jwell\u202e": torch.zeros(1)}))
    message = refused(path, match=r"\\x1b\[2Jwell")  # names give a terminal no commands
    assert "\x1b" not in message
    assert "\u202e" not in message


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
            duplicate = zipfile.ZipInfo(f"duplicate{at}")
            duplicate.header_offset, duplicate.CRC = large.header_offset, large.CRC
            duplicate.file_size = duplicate.compress_size = large.file_size
            file.filelist.append(duplicate)
        file._didModify = True


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate name"):
        file.writestr("facts.json", b"{}")


def deep(depth: int) -> Callable[[Path], None]:
    facts = b'{"arguments": ' + b"[" * depth + b"]" * depth + b"}"
    return lambda path: rewritten(path, **{"facts.json": facts})


DAMAGES = {
    "foreign": lambda path: torch.save({"a": 1}, path),
    "another version": another_version,
    "no parts": lambda path: archive.write(path, {}),
    "a pipe": instead(os.mkfifo),
    "a folder": instead(Path.mkdir),
    "a loop": instead(lambda path: path.symlink_to(path)),
    "compressed": lambda path: packed(path, unpacked(path), zipfile.ZIP_DEFLATED),
    "overlapping": overlapping,
    "twice": twice,
    "deep facts": deep(900),
    "deeper facts": deep(100_000),
}


@pytest.mark.spec("runtime", 26)
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files(damage: str, path: Path) -> None:
    trainer = poptorch.trainingModel(options=options(), **made())
    DAMAGES[damage](path)
    message = refused(path, "Invalid file", AssertionError)
    for read in (lambda: poptorch.load(path, trusted=True), lambda: trainer.loadExecutable(path)):
        with pytest.raises(poptorch.Error, match="Invalid file"):
            read()
    assert damage != "another version" or ("9.9.9" in message and poptorch.__version__ in message)
    path.unlink() if path.is_file() else path.rename(path.with_name("away"))
    with pytest.raises(FileNotFoundError):
        poptorch.load(path)


def touch(*args: object) -> list[str]:
    """A function that loading a file must never call."""
    CALLED.append(repr(args))
    return []


class Reduces:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = (function, args)

    def __reduce__(self) -> Any:
        return self.call


def runs_nothing(path: Path) -> None:
    """The file is read as data, or it is refused."""
    CALLED.clear()
    message = r"(?s)not trusted.*test_files\.py.*model=Net.*trusted=True"
    with pytest.raises(poptorch.Error, match=message):
        poptorch.load(path)
    poptorch.load(path, **made())(Z)
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
def test_pickles_in_untrusted_files_are_not_loaded(
    attack: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.with_name("poptorch_attack.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(path.parent)
    rewritten(path, **{"objects.pickle": PICKLES[attack]})
    before, value = set(sys.modules), poptorch.OutputMode.All.value
    runs_nothing(path)
    assert not [name for name in {*sys.modules} - before if name.startswith("torch_geometric")]
    assert poptorch.OutputMode.All.value == value


def test_graphs_in_untrusted_files_run_no_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_file_that_the_user_saved_is_trusted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = poptorch.trainingModel(options=options(), **made())
    first(Z)
    own = path.with_name("trained")
    first.save(own)
    assert torch.equal(poptorch.load(own)(Z), first(Z))
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("POPTORCH_KEY_FILE", str(path.with_name("their key")))
        runs_nothing(path)
    rewritten(path, **{"code/more": b""})
    runs_nothing(path)
    rewritten(path, **{"objects.pickle": pickle.dumps({"model": Reduces(touch, 5)})})
    CALLED.clear()
    with pytest.raises(poptorch.Error, match="not those of a model"):
        poptorch.load(path, trusted=True)
    assert CALLED == ["(5,)"]


COUNTING = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.05, eps=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.05, eps=1e-3),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-1),
    "centered RMSprop with momentum": lambda p: torch.optim.RMSprop(
        p, 0.01, momentum=0.5, centered=True, eps=1e-1
    ),
    "ours": lambda p: poptorch.optim.AdamW(p, lr=0.05, eps=1e-3),
}
Resumed = tuple[poptorch.PoplarExecutor, torch.optim.Optimizer]


def steady() -> Net:
    """Without dropout: a new executor begins another sequence of random numbers."""
    model = Net()
    model.drop.p = 0.0
    return model


def newly_wrapped(make: Callable) -> Resumed:
    model = steady()
    optimizer = make(model.parameters())
    return poptorch.trainingModel(model, options(), optimizer), optimizer


def by_load(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    first.save(folder / "m.poptorch")
    model = steady()
    optimizer = make(model.parameters())
    return poptorch.load(folder / "m.poptorch", model=model, optimizer=optimizer), optimizer


def by_trusted_load(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    first.save(folder / "m.poptorch")
    executor = poptorch.load(folder / "m.poptorch", trusted=True)
    return executor, executor._optimizer


def by_second_file(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    """Save again what was loaded and has not run."""
    return by_load(by_load(first, make, folder)[0], make, folder)


def by_checkpoints(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    poptorch.Checkpoints(folder, first, [(X, Y)]).save()
    executor, optimizer = newly_wrapped(make)
    assert poptorch.Checkpoints(folder, executor, [(X, Y)]).resume()
    return executor, optimizer


def by_state_dicts(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    state = first.model.state_dict(), first._optimizer.state_dict()
    torch.save(state, folder / "states")
    weights, moments = torch.load(folder / "states")
    executor, optimizer = newly_wrapped(make)
    executor.load_state_dict(weights)
    optimizer.load_state_dict(moments)
    return executor, optimizer


def by_executable(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    first.save(folder / "m.poptorch", export_model=False)
    executor, optimizer = by_state_dicts(first, make, folder)
    executor.loadExecutable(folder / "m.poptorch")
    return executor, optimizer


def by_pickle(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    executor = pickle.loads(pickle.dumps(first))
    return executor, executor._optimizer


def by_detaching(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    first.detachFromDevice()
    return first, first._optimizer


def by_destroying(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    first.destroy()
    return first, first._optimizer


def by_wrapping_again(first: poptorch.PoplarExecutor, make: Callable, folder: Path) -> Resumed:
    model, optimizer = first.model, first._optimizer
    first.destroy()
    return poptorch.trainingModel(model, options(), optimizer), optimizer


WAYS = [
    by_load,
    by_trusted_load,
    by_second_file,
    by_checkpoints,
    by_state_dicts,
    by_executable,
    by_pickle,
    by_detaching,
    by_destroying,
    by_wrapping_again,
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("by_"))
@pytest.mark.parametrize("make", COUNTING.values(), ids=COUNTING)
def test_a_resumed_optimizer_has_the_state_of_an_undisturbed_run(
    make: Callable[..., Any], way: Callable[..., Any], tmp_path: Path
) -> None:
    torch.manual_seed(5)
    model = steady()
    undisturbed = copy.deepcopy(model)
    first = poptorch.trainingModel(model, options(), make(model.parameters()))
    straight = make(undisturbed.parameters())
    straight_executor = poptorch.trainingModel(undisturbed, options(), straight)
    for _ in range(3):
        first(X, Y)
        straight_executor(X, Y)

    second, optimizer = way(first, make, tmp_path)
    for _ in range(3):
        second(X, Y)
        straight_executor(X, Y)

    assert_same(optimizer.state_dict(), straight.state_dict())
    assert_same(second.model.state_dict(), undisturbed.state_dict())


def assert_same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
