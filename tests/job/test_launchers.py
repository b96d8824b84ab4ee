"""What a launcher's environment says: who this process is, and at which endpoint all meet."""

import operator
import socket

import pytest

import popdist
import popdist.poptorch
import poptorch
from poptorch import _job


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


POPRUN = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "POPDIST_NUM_TOTAL_REPLICAS": "8",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_NUM_IPUS_PER_REPLICA": "2",
}
TORCHRUN = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}
MPIRUN = {f"OMPI_COMM_WORLD_{n.removeprefix('WORLD_')}": v for n, v in TORCHRUN.items()}
TWO, LOCAL_SIZE = {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_LOCAL_SIZE"
OF_A = {**TWO, "PMIX_NAMESPACE": "a"}


def names() -> tuple[object, ...]:
    """Return what popdist reports for this process."""
    return (
        popdist.isPopdistEnvSet(),
        popdist.getInstanceIndex(),
        popdist.getNumInstances(),
        popdist.getLocalInstanceIndex(),
        popdist.getNumTotalReplicas(),
        popdist.getNumLocalReplicas(),
        popdist.getNumIpusPerReplica(),
    )


@pytest.mark.spec("programs", 12)
def test_outside_of_a_job_there_is_one_instance() -> None:
    assert names() == (False, 0, 1, 0, 1, 1, 1)
    popdist.init()  # nobody to meet
    options = popdist.poptorch.Options(ipus_per_replica=2)
    assert options.replication_factor == 1
    assert options.Distributed.numProcesses == 1


@pytest.mark.parametrize(
    "variables, expected",
    [
        (POPRUN, (True, 3, 4, 1, 8, 2, 2)),
        (TORCHRUN, (True, 3, 4, 1, 4, 1, 1)),
        (MPIRUN, (True, 3, 4, 1, 4, 1, 1)),
    ],
)
def test_every_launcher_is_understood(
    variables: dict[str, str], expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert names() == expected
    options = popdist.poptorch.Options()
    place = options.Distributed
    assert place.processId == 3
    assert place.numProcesses == 4
    assert options.replication_factor == expected[5]


@pytest.mark.spec("parallel", 38)
def test_settings_of_the_launcher_cannot_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in POPRUN.items():
        monkeypatch.setenv(name, value)
    made = popdist.poptorch.Options(ipus_per_replica=2).outputMode(poptorch.OutputMode.All)
    calls = {
        "useIpuId": (1,),
        "replicationFactor": (2,),
        "Distributed.disable": (),
        "Distributed.setEnvVarNames": ("A", "B"),
        "Distributed.configureProcessId": (0, 1),
    }
    for options in (made, made.clone()):
        for name, arguments in calls.items():
            with pytest.raises(RuntimeError) as caught:
                operator.attrgetter(name)(options)(*arguments)
            assert f"Cannot call `{name}` with popdist.poptorch.Options" in str(caught.value)
        assert options.toDict()["replication_factor"] == 2
    made._freeze()
    assert made.toDict()["distributed_process_id"] == 3
    with pytest.raises(AttributeError):
        made.deviceIterations(2)
    with pytest.raises(ValueError, match="launcher's"):
        popdist.poptorch.Options(ipus_per_replica=4)


def test_processes_that_share_stages_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "POPDIST_STAGE_PROCESSES": "2"}.items():
        monkeypatch.setenv(name, value)
    assert popdist.getNumTotalReplicas() == 2
    assert popdist.getNumLocalReplicas() == 1
    options = popdist.poptorch.Options()
    assert options.Distributed.stage_processes == popdist.getNumStageProcesses() == 2
    options.Distributed.stageProcesses(2)
    with pytest.raises(RuntimeError, match="poprun --stage-processes 4"):
        options.Distributed.stageProcesses(4)


def test_functions_are_called_on_the_instances_that_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert popdist.execute_on_instances({3}, lambda x: x + 1, 1) == 2
    assert popdist.execute_on_instances({0}, lambda x: x + 1, 1) is None

    @popdist.execute_on_instances({0, 3})
    def here(x: int) -> int:
        return x

    assert here(5) == 5


@pytest.mark.parametrize(
    "variables, address",
    [
        ({}, None),
        ({"MASTER_ADDR": "head", "MASTER_PORT": "7"}, "head"),
        (OF_A, None),
        ({**OF_A, LOCAL_SIZE: "1"}, None),
        ({**OF_A, LOCAL_SIZE: "2"}, "127.0.0.1"),
        ({**TWO, LOCAL_SIZE: "2", "OMPI_MCA_ess_base_jobid": "7"}, "127.0.0.1"),
    ],
)
def test_where_processes_meet(
    variables: dict[str, str], address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    place = _job.endpoint()
    assert (place.address if place else None) == address


def test_processes_of_one_machine_have_one_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = socket.gethostname()
    assert _job.own_address() == name  # nothing says where they meet
    monkeypatch.setenv("MASTER_PORT", "29500")
    for address, own in (("127.0.0.1", "127.0.0.1"), ("no.such.host.invalid", name)):
        monkeypatch.setenv("MASTER_ADDR", address)
        assert _job.own_address() == own
