"""Nothing is set in silence: every option and variable changes something, or the log says not."""

from __future__ import annotations

import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch
from poptorch._base import env, log
from poptorch._base.errors import Error
from poptorch.autocasting import Policy
from poptorch.enums import CommGroupType, HalfFloatCastingBehavior, OutputMode
from poptorch.options import Options, ShardedExecution, TensorLocationSettings, overview
from poptorch.options.freeze import freeze, prepare
from poptorch.options.popart_keys import KEYS
from poptorch.options.table import IDLE, UNSET, Setting

TESTS = Path(__file__).resolve().parents[1]
OFF_CHIP = TensorLocationSettings().useOnChipStorage(False)
# Arguments where the default's type does not say enough.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "anchorTensor": ("short", "long"),
    "backend": ("reference",),
    "disableModuleNamescope": (),
    "enableExecutableCaching": ("folder",),
    "enableProfiling": ("reports",),
    "inputReplicaGrouping": (2, CommGroupType.Consecutive),
    "outputMode": (OutputMode.Sum,),
    "setAvailableMemoryProportion": ({"IPU0": 0.1},),
    "setExecutionStrategy": (ShardedExecution(),),
    "sourceLocationExcludes": (["mine"],),
    "updatableNamedBuffers": (["buffer"],),
    "useIpuModel": (True,),
    "useOfflineIpuTarget": (21,),
    "Distributed.configureProcessId": (1, 2),
    "Precision.autocastPolicy": (Policy([torch.mm], [], [], []),),
    "Precision.halfFloatCasting": (HalfFloatCastingBehavior.HalfUpcastToFloat,),
    "Precision.setPartialsType": (torch.half,),
    "TensorLocations.numIOTiles": (64,),
    **{
        f"TensorLocations.set{kind}Location": (OFF_CHIP,)
        for kind in ("Activation", "Weight", "Optimizer", "Accumulator")
    },
}
# What an executor or a loader reads from the options themselves, shown by running one.
RUN: dict[str, Callable[[], None]] = {}


def shown_by(option: str) -> Callable[[Callable[[], None]], None]:
    def note(probe: Callable[[], None]) -> None:
        RUN[option] = probe

    return note


@shown_by("showCompilationProgressBar")
def _no_compilation_time() -> None:
    wrapper = poptorch.inferenceModel(lambda x: x + 1, Options().showCompilationProgressBar(False))
    wrapper.compile(torch.ones(1))
    with pytest.raises(Error, match="progress bar"):
        wrapper.compilationTime()


@shown_by("relaxOptimizerAttributesChecks")
def _no_warning() -> None:
    texts = []
    for relaxed in (False, True):
        layer = torch.nn.Linear(1, 1)

        def train(x: torch.Tensor, layer: torch.nn.Module = layer) -> Any:
            return poptorch.identity_loss(layer(x), "mean")

        model = torch.nn.Module()
        model.layer, model.forward = layer, train
        optimizer = poptorch.optim.SGD(layer.parameters(), lr=0.1)
        opts = Options().relaxOptimizerAttributesChecks(relaxed).showCompilationProgressBar(False)
        wrapper = poptorch.trainingModel(model, opts, optimizer)
        other = poptorch.optim.SGD(layer.parameters(), lr=0.1)
        other.param_groups[0]["invented"] = 1
        seen: list[str] = []
        log.python.addFilter(lambda record, seen=seen: seen.append(record.levelname) or True)
        wrapper.setOptimizer(other)
        log.python.filters.pop()
        texts.append("WARNING" in seen)
        wrapper.destroy()
    assert texts == [True, False]


@shown_by("Distributed.configureProcessId")
def _several_processes() -> None:
    options = Options()
    options.Distributed.configureProcessId(1, 2)
    with pytest.raises(Error, match="processes"):
        prepare(options, training=True)


def example(setting: Setting) -> tuple[Any, ...]:
    """Arguments of a setter that change the option."""
    if setting.option in ARGUMENTS:
        return ARGUMENTS[setting.option]
    value = setting.row.values[0]
    if isinstance(value.kind, type) and issubclass(value.kind, enum.Enum):
        return (list(value.kind)[1],)
    default = value.default
    if isinstance(default, enum.Enum):
        return (next(member for member in type(default) if member != default),)
    if default is UNSET:
        return ("text",) if value.kind is str else (3,) if value.kind is int else (True,)
    if isinstance(default, bool):
        return (not default,)
    return (default + "x",) if isinstance(default, str) else (default + 2,)


def change(options: Options, setting: Setting) -> None:
    """Set an option to something other than its default."""
    if not setting.option.startswith("_Popart"):
        target: Any = options
        for name in setting.option.split("."):
            target = getattr(target, name)
        target(*example(setting))
        return
    key = setting.row.values[0].name
    values = {
        "bool": setting.row.values[0].default is not True,
        "int": 0,
        "float": 1.5,
        "string": "text",
        "list": ["0"],
        "dictionary": {"key": "value"},
    }
    value = next(value for kind, value in values.items() if key in KEYS[kind])
    options._Popart.set(key, value)


@pytest.fixture
def nothing_said(monkeypatch):
    monkeypatch.setattr(overview, "_said", set())


@pytest.mark.parametrize("setting", overview.settings(Options()), ids=lambda s: s.option)
def test_every_option_changes_something_or_says_that_it_does_not(setting, nothing_said, caplog):
    plain, options = (Options().replicationFactor(2) for _ in range(2))
    change(options, setting)
    if setting.option in RUN:
        RUN[setting.option]()
        assert options.withoutEffect() == []
        return
    same = freeze(options, training=True) == freeze(plain, training=True)
    for _ in range(2):
        with caplog.at_level("INFO", logger="poptorch::python"):
            prepare(options.clone(), training=True)
    lines = [r.getMessage() for r in caplog.records if "no effect here" in r.getMessage()]
    if setting.row.effect in IDLE:
        assert options.withoutEffect() == [setting.option]
        assert len(lines) == 1
        assert lines[0].startswith(f"{setting.option} has no effect here. ")
    else:
        assert not same
        assert options.withoutEffect() == lines == []


def test_what_is_asked_for_and_missing_is_a_warning(nothing_said, caplog):
    prepare(Options().enableProfiling("here"), training=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    prepare(Options().enableProfiling("there").enableStableNorm(True), training=True)
    assert not caplog.records  # said once; a hint is an INFO line


def test_profile_of_the_first_release_says_so_too(nothing_said, caplog):
    poptorch.inferenceModel(lambda x: x, 1, profile=True)
    assert any("enableProfiling has no effect" in r.getMessage() for r in caplog.records)


def test_automatic_recomputation_has_an_effect():
    options = Options()
    options._Popart.set("autoRecomputation", 1)
    assert freeze(options, training=True).recompute is True
    assert options.withoutEffect() == []
    options._Popart.set("autoRecomputation", 0)
    assert freeze(options, training=True).recompute is False


def spec() -> Any:
    return freeze(Options(), training=True)


def processes() -> int:
    return Options().Distributed.numProcesses


# A variable of the table: what to set, what to observe; or the test file that sets it.
VARIABLES: dict[str, tuple[dict[str, str], Callable[[], Any]] | str] = {
    "POPTORCH_LOG_LEVEL": "test_runtime.py",
    "POPTORCH_LOG_DEST": "base/test_log.py",
    "POPTORCH_BACKEND": ({"": "reference"}, spec),
    "POPTORCH_IPU_MODEL": ({"": "1"}, spec),
    "POPTORCH_SMALL_IPU_MODEL": ({"": "1"}, spec),
    "POPTORCH_IPU_MODEL_VERSION": ({"": "ipu1"}, spec),
    "POPTORCH_POD": "machine/test_systems.py",
    "POPTORCH_POD_DIR": "machine/test_pod.py",
    "POPTORCH_WAIT_FOR_IPU": "test_hardware.py",
    "OMPI_COMM_WORLD_SIZE": ({"": "2"}, processes),
    "OMPI_COMM_WORLD_RANK": (
        {"": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        lambda: Options().Distributed.processId,
    ),
    "WORLD_SIZE": ({"": "2"}, processes),
    "RANK": ({"": "1", "WORLD_SIZE": "2"}, lambda: Options().Distributed.processId),
    "POPTORCH_FULL_TRACEBACK": "session/test_errors.py",
    "POPTORCH_KEEP_FREED_MEMORY": "backends/test_allocator.py",
    "POPTORCH_CACHE_DIR": ({"": "folder"}, spec),
    "POPART_CACHE_DIR": ({"": "folder"}, spec),
    "POPTORCH_DEFAULT_OPTIONS": ({"": '{"deviceIterations": 3}'}, spec),
    "POPTORCH_POISON_BUFFERS": "test_accessor.py",
    "POPTORCH_EXPORT_PROTO_FILE": "test_runtime.py",
    "POPTORCH_EXPORT_PROTO_AS_BINARY": "test_runtime.py",
    "PVTI_OPTIONS": "test_profiling.py",
    "TORCHINDUCTOR_CACHE_DIR": "backends/test_inductor_toolchain.py",
    "CXX": "backends/test_inductor_toolchain.py",
}


@pytest.mark.parametrize("name", env.TABLE)
def test_every_variable_changes_something_or_says_that_it_does_not(
    name, nothing_said, monkeypatch, caplog
):
    if "without effect" in env.TABLE[name].effect:
        monkeypatch.setenv(name, '{"autoReport.all": "true"}')
        prepare(Options(), training=True)
        prepare(Options(), training=True)
        lines = [record.getMessage() for record in caplog.records]
        assert len(lines) == 1
        assert f"{name} has no effect here" in lines[0]
        return
    assert name in VARIABLES, "say here what the new variable changes, or where that is tested"
    shown = VARIABLES[name]
    if isinstance(shown, str):
        text = (TESTS / shown).read_text()
        assert f'"{name}"' in text or f"{name}=" in text
        return
    values, observe = shown
    if "IPU_MODEL_VERSION" in name:
        monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    before = observe()
    for variable, value in values.items():
        monkeypatch.setenv(variable or name, value)
    assert observe() != before


def test_excluded_files_are_not_the_users(tmp_path):
    helper = tmp_path / "helper_of_mine.py"
    helper.write_text("def branch(x):\n    return x if x.sum() > 0 else -x\n")
    names: dict[str, Any] = {}
    exec(compile(helper.read_text(), str(helper), "exec"), names)

    def read_at(options: Options) -> str:
        lines: list[str] = []

        def record(entry: Any) -> bool:
            lines.append(entry.getMessage())
            return True

        log.python.addFilter(record)
        wrapper = poptorch.inferenceModel(lambda x: names["branch"](x), options)
        wrapper(torch.ones(2))
        log.python.removeFilter(record)
        return next(line for line in lines if ".py:" in line)

    quiet = Options().showCompilationProgressBar(False)
    assert "helper_of_mine.py:2" in read_at(quiet)
    line = read_at(quiet.clone().appendToLocationExcludes("helper_of"))
    assert "helper_of_mine" not in line
    assert "test_observable.py" in line


def test_a_named_model_has_its_name_in_its_plan():
    plain, named = (
        poptorch.inferenceModel(lambda x: x + 1, options.showCompilationProgressBar(False))
        for options in (Options(), Options().modelName("adder"))
    )
    for wrapper in (plain, named):
        wrapper.compile(torch.ones(1))
    assert str(named.plan()).startswith("model adder\n")
    assert "model" not in str(plain.plan()).splitlines()[0]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1"}, {}]
)
def test_no_model_is_shared_by_several_processes_yet(training, variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = Options()
    if not variables:
        options.Distributed.configureProcessId(1, 2)
    model = torch.nn.Linear(1, 1)
    wrap = poptorch.trainingModel if training else poptorch.inferenceModel
    with pytest.raises(
        poptorch.Error, match="Several processes cannot share a model yet"
    ) as caught:
        wrap(model, options)
    assert "of 2" in str(caught.value)
    assert "Distributed.disable()" in str(caught.value)
    assert "test_observable.py" in str(caught.value)
    options.Distributed.disable()  # not frozen, the model not wrapped
    wrap(model, options).destroy()
