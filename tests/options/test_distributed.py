"""The process of a job: its index and number, where processes meet, and shared stages."""

import pytest
import torch

import poptorch
from poptorch._ir.spec import Spec
from poptorch.options import Options
from poptorch.options.freeze_options import freeze


@pytest.fixture
def rank_3_of_4_by_openmpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")


@pytest.mark.spec("options", 30)
@pytest.mark.usefixtures("rank_3_of_4_by_openmpi")
def test_rank_and_size_are_those_of_openmpi() -> None:
    distributed = Options().Distributed

    assert distributed.processId == 3
    assert distributed.numProcesses == 4


@pytest.mark.spec("options", 30)
@pytest.mark.usefixtures("rank_3_of_4_by_openmpi")
def test_disable_leaves_one_process_with_id_zero() -> None:
    distributed = Options().Distributed

    returned = distributed.disable()

    assert returned is distributed
    assert distributed.processId == 0
    assert distributed.numProcesses == 1


@pytest.mark.usefixtures("rank_3_of_4_by_openmpi")
def test_rank_and_size_set_by_hand_replace_those_of_openmpi() -> None:
    distributed = Options().Distributed

    distributed.configureProcessId(2, 5)

    assert distributed.processId == 2
    assert distributed.numProcesses == 5


def test_rank_and_size_can_come_from_variables_of_other_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_COUNT", "7")
    monkeypatch.setenv("MY_ID", "6")

    distributed = Options().Distributed.setEnvVarNames("MY_COUNT", "MY_ID")

    assert distributed.processId == 6
    assert distributed.numProcesses == 7


def test_a_variable_that_is_not_set_leaves_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_COUNT", "7")

    distributed = Options().Distributed.configureProcessId(2, 5)
    distributed.setEnvVarNames("MY_COUNT", "MY_ID")

    assert distributed.processId == 0
    assert distributed.numProcesses == 7


def test_a_variable_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_COUNT", "7")
    monkeypatch.setenv("MY_ID", "first")

    with pytest.raises(ValueError):
        Options().Distributed.setEnvVarNames("MY_COUNT", "MY_ID")


@pytest.fixture(params=["by OpenMPI", "by torchrun", "by hand"])
def one_of_two_processes(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Options:
    """Options of one of two processes, without an address at which the two could meet."""
    if request.param == "by OpenMPI":
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    if request.param == "by torchrun":
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", "1")
    options = Options()
    if request.param == "by hand":
        options.Distributed.configureProcessId(1, 2)
    return options


@pytest.mark.parametrize("message", ["of 2", "Distributed.disable()", "test_distributed.py"])
def test_training_processes_that_cannot_meet_are_an_error(
    one_of_two_processes: Options, message: str
) -> None:
    model = torch.nn.Linear(1, 1)
    training = poptorch.trainingModel(model, one_of_two_processes, loss=torch.nn.L1Loss())

    title = "The address at which the processes of this job meet is not set"
    with pytest.raises(poptorch.Error, match=title) as error:
        training(torch.ones(1, 1), torch.ones(1, 1))

    assert message in str(error.value)


def test_inference_waits_for_no_other_process(one_of_two_processes: Options) -> None:
    model = poptorch.inferenceModel(torch.nn.Linear(1, 1), one_of_two_processes)

    assert model(torch.ones(1, 1)).shape == (1, 1)


def sharing_stages(process: int) -> Spec:
    """Options of one of six processes with three replicas each; two share the stages of a
    replica.
    """
    options = Options().replicationFactor(3)
    options.Distributed.configureProcessId(process, 6).stageProcesses(2)
    return freeze(options, training=False)


@pytest.mark.spec("options", 32)
def test_the_replication_factor_is_that_of_one_process() -> None:
    assert sharing_stages(process=4).loops.replicas == 3


@pytest.mark.spec("options", 32)
def test_processes_that_share_stages_are_one_share_of_the_data() -> None:
    spec = sharing_stages(process=4)

    assert spec.loops.processes == 3
    assert spec.target.process_id == 2
    assert spec.target.part == 0
    assert spec.target.backend == "staged"


def test_processes_that_share_stages_keep_their_number_and_index() -> None:
    spec = sharing_stages(process=4)

    assert spec.processes == 6
    assert spec.process == 4
    assert spec.first_replica == 2 * 3


def test_processes_that_share_stages_compile_the_same_program() -> None:
    assert sharing_stages(process=5).for_cache() == sharing_stages(process=4).for_cache()
