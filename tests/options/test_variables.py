"""Every variable of the environment changes something."""

from __future__ import annotations

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
from poptorch._cli import poprun
from poptorch._compile.cache import default_store
from poptorch._job.rendezvous import store_owner
from poptorch.backends import process
from poptorch.backends.inductor import toolchain
from poptorch.enums import SharingStrategy
from poptorch.options import Options, overview
from poptorch.options.freeze import freeze


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
def test_every_variable_changes_something(name, log_as_it_was, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(overview, "_reported", set())
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
    assert "test_variables.py" in str(caught.value)
    training.destroy()
    other = poptorch.inferenceModel(model, options)  # it waits for nobody
    assert other(torch.ones(1, 1)).shape == (1, 1)
