"""Nothing is set in silence: every option and variable changes something, or the log says not."""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import popdist
import poptorch
from poptorch import _job, _pod, _systems, profiling
from poptorch._base import env, keyed, log
from poptorch._base.errors import Error
from poptorch._cli import poprun
from poptorch._compile.cache import default_store
from poptorch._job.rendezvous import store_owner
from poptorch.autocasting import Policy
from poptorch.backends import process
from poptorch.backends.inductor import toolchain
from poptorch.enums import (
    CommGroupType,
    HalfFloatCastingBehavior,
    OutputMode,
    SharingStrategy,
)
from poptorch.options import Options, ShardedExecution, TensorLocationSettings, overview
from poptorch.options.freeze import freeze, prepare
from poptorch.options.popart import KEYS
from poptorch.options.table import IDLE, UNSET, Setting

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
def nothing_reported(monkeypatch):
    monkeypatch.setattr(overview, "_reported", set())


@pytest.mark.parametrize("setting", overview.settings(Options()), ids=lambda s: s.option)
def test_every_option_changes_something_or_says_that_it_does_not(setting, nothing_reported, caplog):
    plain, options = (Options().replicationFactor(2) for _ in range(2))
    if setting.option == "Distributed.stageProcesses":  # there must be so many processes
        for each in (plain, options):
            each.Distributed.configureProcessId(0, 6)
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


def test_what_is_asked_for_and_missing_is_a_warning(nothing_reported, caplog):
    prepare(Options().logDir("here"), training=True)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    caplog.clear()
    prepare(Options().logDir("there").enableStableNorm(True), training=True)
    assert not caplog.records  # said once; a hint is an INFO line


def test_engine_options_that_nothing_reads_are_named(nothing_reported, caplog, monkeypatch):
    text = '{"autoReport.all": "true", "debug.instrument": "true"}'
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", text)
    prepare(Options(), training=True)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "POPLAR_ENGINE_OPTIONS: no effect here of debug.instrument"


def test_profile_of_the_first_release_asks_for_reports():
    executor = poptorch.inferenceModel(lambda x: x, 1, profile=True)
    assert freeze(executor.options, training=False).runtime.report == os.getcwd()


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


def quiet() -> Options:
    return Options().backend("reference").showCompilationProgressBar(False)


def adder() -> poptorch.PoplarExecutor:
    return poptorch.inferenceModel(lambda x: x + 1, quiet())


def log_level() -> int:
    log.setup()
    return log.python.level


def log_destination() -> Any:
    handlers, log.engine.handlers = log.engine.handlers, []
    log.setup()
    (made,), log.engine.handlers = log.engine.handlers, handlers
    return made.stream is sys.stdout


def waits_for_chips() -> list[bool]:
    asked: list[bool] = []

    def acquire(count: int, ident: int | None, wait: bool) -> Any:
        asked.append(wait)
        return real(count, ident, False)

    real, _pod.acquire = _pod.acquire, acquire
    try:
        adder()(torch.ones(1))
    finally:
        _pod.acquire = real
    return asked


def frames_of_an_error() -> int:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        poptorch.inferenceModel(broken, quiet())(torch.ones(1))
    return len(caught.traceback)


def keeps_freed_memory() -> bool:
    real, process._set_thresholds = process._set_thresholds, lambda: True
    try:
        return process.keep_freed_memory()
    finally:
        process._set_thresholds = real


def written_programs() -> dict[str, str]:
    adder().compile(torch.ones(1))
    return {path.name: path.read_text() for path in Path().glob("*.txt")}


def poisoned_buffers() -> list[bool]:
    data = [torch.ones(1) for _ in range(3)]
    made = poptorch.AsynchronousDataAccessor(
        data, buffer_size=10, load_indefinitely=False, sharing_strategy=SharingStrategy.Fork
    )
    kept = list(made)
    made.terminate()
    return [bool(element.isnan().any()) for element in kept]


OPENMPI = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}

# A variable of the table: what is set (itself is ""), what is set in any case, what is observed.
VARIABLES: dict[str, tuple[dict[str, str], dict[str, str], Callable[[], Any]]] = {
    "POPTORCH_LOG_LEVEL": ({"": "ERR"}, {}, log_level),
    "POPTORCH_LOG_DEST": ({"": "stdout"}, {}, log_destination),
    "POPTORCH_BACKEND": ({"": "reference"}, {}, spec),
    "POPTORCH_IPU_MODEL": ({"": "1"}, {}, spec),
    "POPTORCH_SMALL_IPU_MODEL": ({"": "1"}, {}, spec),
    "POPTORCH_IPU_MODEL_VERSION": ({"": "ipu1"}, {"POPTORCH_IPU_MODEL": "1"}, spec),
    "POPLAR_ENGINE_OPTIONS": ({"": '{"autoReport.all": "true"}'}, {}, spec),
    "POPTORCH_POD": ({"": "4"}, {}, lambda: poptorch.ipuHardwareIsAvailable(8)),
    "POPTORCH_POD_DIR": ({"": "pod"}, {}, lambda: _pod._place(_systems.current())),
    "POPTORCH_WAIT_FOR_IPU": ({"": "1"}, {}, waits_for_chips),
    "OMPI_COMM_WORLD_SIZE": ({"": "2"}, {}, processes),
    "OMPI_COMM_WORLD_RANK": (
        {"": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        lambda: Options().Distributed.processId,
    ),
    "WORLD_SIZE": ({"": "2"}, {}, processes),
    "RANK": ({"": "1"}, {"WORLD_SIZE": "2"}, lambda: Options().Distributed.processId),
    "POPTORCH_FULL_TRACEBACK": ({"": "1"}, {}, frames_of_an_error),
    "POPTORCH_KEEP_FREED_MEMORY": ({"": "0"}, {}, keeps_freed_memory),
    "POPTORCH_CACHE_DIR": ({"": "folder"}, {}, spec),
    "POPART_CACHE_DIR": ({"": "folder"}, {}, spec),
    "POPTORCH_DEFAULT_OPTIONS": ({"": '{"deviceIterations": 3}'}, {}, spec),
    "POPTORCH_POISON_BUFFERS": ({"": "1"}, {}, poisoned_buffers),
    "POPTORCH_EXPORT_PROTO_FILE": ({"": "program.txt"}, {}, written_programs),
    "POPTORCH_EXPORT_PROTO_AS_BINARY": (
        {"": "1"},
        {"POPTORCH_EXPORT_PROTO_FILE": "program.txt"},
        written_programs,
    ),
    "PVTI_OPTIONS": ({"": '{"enable": "true"}'}, {}, profiling._settings),
    "TORCHINDUCTOR_CACHE_DIR": ({"": "code"}, {}, lambda: default_store().folder),
    "POPTORCH_KEY_FILE": ({"": "key"}, {}, lambda: keyed.digest("name", b"code")),
    "CXX": ({"": "/nowhere/c++"}, {}, toolchain.obstacle),
    "LOCAL_RANK": ({"": "1"}, {"WORLD_SIZE": "2"}, popdist.getLocalInstanceIndex),
    "OMPI_COMM_WORLD_LOCAL_RANK": (
        {"": "1"},
        {"OMPI_COMM_WORLD_SIZE": "2"},
        popdist.getLocalInstanceIndex,
    ),
    "POPDIST_NUM_TOTAL_REPLICAS": ({"": "4"}, {}, popdist.getNumTotalReplicas),
    "POPDIST_NUM_LOCAL_REPLICAS": ({"": "2"}, {}, popdist.getNumLocalReplicas),
    "POPDIST_NUM_IPUS_PER_REPLICA": ({"": "2"}, {}, popdist.getNumIpusPerReplica),
    "POPDIST_STAGE_PROCESSES": ({"": "2"}, {}, popdist.getNumStageProcesses),
    "MASTER_ADDR": ({"": "head"}, {"MASTER_PORT": "7"}, _job.endpoint),
    "MASTER_PORT": ({"": "7"}, {"MASTER_ADDR": "head"}, _job.endpoint),
    "TORCHELASTIC_USE_AGENT_STORE": ({"": "True"}, {}, store_owner),
    "OMPI_COMM_WORLD_LOCAL_SIZE": (
        {"": "2"},
        {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "a"},
        _job.endpoint,
    ),
    "PMIX_NAMESPACE": ({"": "a"}, OPENMPI, _job.endpoint),
    "OMPI_MCA_ess_base_jobid": ({"": "a"}, OPENMPI, _job.endpoint),
    "POPTORCH_REMOTE_SHELL": ({"": "rsh -4"}, {}, poprun.remote_shell),
}


@pytest.fixture
def log_as_it_was():
    yield
    log.set_level("WARN")


@pytest.mark.parametrize("name", env.TABLE)
def test_every_variable_changes_something(
    name, nothing_reported, log_as_it_was, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert name in VARIABLES, "say here what the new variable changes"
    values, always, observe = VARIABLES[name]
    monkeypatch.delenv(name, raising=False)
    for variable, value in always.items():
        monkeypatch.setenv(variable, value)
    before = observe()
    assert observe() == before  # it is the variable, not the second look, that makes a difference
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
        poptorch.inferenceModel(lambda x: x + 1, options.backend("reference"))
        for options in (Options(), Options().modelName("adder"))
    )
    for wrapper in (plain, named):
        wrapper.compile(torch.ones(1))
    assert str(named.plan()).startswith("model adder\n")
    assert "model" not in str(plain.plan()).splitlines()[0]


@pytest.mark.parametrize(
    "variables", [{"OMPI_COMM_WORLD_SIZE": "2"}, {"WORLD_SIZE": "2", "RANK": "1"}, {}]
)
def test_processes_that_cannot_meet_are_an_error(variables, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    options = Options()
    if not variables:
        options.Distributed.configureProcessId(1, 2)
    model = torch.nn.Linear(1, 1)
    training = poptorch.trainingModel(model, options, loss=torch.nn.L1Loss())
    title = "Nothing says where the processes of this job meet"
    with pytest.raises(poptorch.Error, match=title) as caught:
        training(torch.ones(1, 1), torch.ones(1, 1))
    assert "of 2" in str(caught.value)
    assert "Distributed.disable()" in str(caught.value)
    assert "test_observable.py" in str(caught.value)
    training.destroy()
    other = poptorch.inferenceModel(model, options)  # it waits for nobody
    assert other(torch.ones(1, 1)).shape == (1, 1)
