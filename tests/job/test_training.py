"""Jobs of several processes: they train as one; those that are lost or unlike others are named."""

import re
import signal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.constants import default_pg_timeout

import poptorch
from helpers import job_cases, job_killed, jobs
from helpers.cases import long
from helpers.job_cases import CASES, SAVED, Case, Result
from helpers.job_fault import DIFFERENCES
from helpers.job_killed import digests

pytestmark = pytest.mark.slow
# By the number of processes: the cases of every run of the tests.
FEW = {
    2: [
        "sgd, sum",
        "adamw, clipped, anchors",
        "adam in parts",
        "machines",
        SAVED,
    ],
    4: ["adam in parts", "stages of two models"],
}
# More cases of two processes, which ``make test-full`` runs.
MORE = [
    "sgd, combined, chunks",
    "adamw in parts, clipped, float64",
    "adafactor not in parts, traced",
    "complex, adamw in parts, clipped",
    "exchanges over processes",
    "groups over processes",
    "lamb in parts",
    "nadam in parts, traced",
    "stages, sharded, batch norm",
]
Results = list[dict[str, dict[str, Any]]]


def job(folder: Path, processes: int, names: list[str]) -> tuple[Results, str]:
    """Return by process what came of each case in one job, and what process 0 printed."""
    ended = jobs.run("helpers.job_cases", [folder, *names], processes, folder)
    assert all(code == 0 for code, _ in ended.values()), ended
    return [torch.load(folder / f"{index}.pt") for index in ended], ended[0][1]


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, case: str) -> None:
    """Compare relative to the largest element, or where stages are shared at least to 1."""
    least = 1.0 if CASES[case].parts > 1 else 0.0
    ours, theirs = (torch.view_as_real(t) if t.is_complex() else t for t in (ours, theirs))
    scale = max(theirs.double().abs().max().item(), least) or 1.0
    difference = (ours.double() - theirs.double()).abs().max().item()
    assert difference <= tolerance * scale, f"{case}: {difference / scale} of the largest"


def part(value: torch.Tensor, case: Case, share: int, shares: int, *row: int) -> torch.Tensor:
    """Return the results of one share of all replicas, of one shape at each step."""
    return value.reshape(-1, shares, case.replicas, *row)[:, share].flatten(0, 1)


def compare(results: Results, name: str) -> Result:
    """Compare with one process that has all replicas and stages; return what that has."""
    case, processes = CASES[name], len(results)
    alone = job_cases.run(case, 0, processes, alone=True)
    loose = case.tolerance * (20 if case.parts == 1 else 1)
    for process, of_process in enumerate(results):
        own, share = Result(**of_process[name]), (process // case.parts, processes // case.parts)
        assert own.weights.keys() == alone.weights.keys()
        for key, weight in own.weights.items():
            # Of replicas, statistics are those of the first one of a process.
            if "running" not in key or case.parts > 1 or process == 0:
                close(weight, alone.weights[key], case.tolerance, name)
        assert own.state.keys() == alone.state.keys()
        for key, moment in own.state.items():
            close(moment, alone.state[key], loose, name)
        for ours, theirs in zip(own.outputs, alone.outputs, strict=True):
            expected = part(theirs, case, *share, 3, *theirs.shape[1:])
            close(ours.reshape(expected.shape), expected, loose, name)
        for ours, theirs in zip(own.losses, alone.losses, strict=True):
            close(ours.reshape(-1), part(theirs, case, *share), loose, name)
        for key, anchor in own.anchors.items():
            theirs = alone.anchors[key]
            expected = part(theirs, case, *share, 3) if key == "gradient" else theirs
            close(anchor.reshape(expected.shape), expected, loose, name)
        for ours, theirs in zip(own.inferred, alone.inferred, strict=True):
            close(ours, theirs, loose, name)
        # The script has added up numbers of its own meanwhile, by torch's own limit.
        assert own.exchanged is not None
        assert own.exchanged.tolist() == [sum(range(processes + 1))] * len(own.exchanged)
        assert of_process["limit"]["seconds"] == default_pg_timeout.total_seconds()
    return alone


@pytest.mark.parametrize(
    "processes, names",
    [
        long(
            2,
            [
                name
                for name, case in CASES.items()
                if name not in FEW[2] + MORE and case.parts * case.replicas < 3
            ],
        ),
        long(3, ["stages over three"]),
        long(4, [name for name, case in CASES.items() if name not in FEW[4] and case.parts == 1]),
    ],
)
def test_processes_train_as_one(processes: int, names: list[str], tmp_path: Path) -> None:
    results, _ = job(tmp_path, processes, names)
    for name in names:
        compare(results, name)


def program(results: Results, name: str, end: str = "  #") -> list[str]:
    """Return what the plan says that is done, line by line."""
    return [line.split(end)[0].strip() for line in results[0][name]["program"].splitlines()]


def exchanges(results: Results, name: str) -> list[str]:
    """Return the lines of the plan in which processes exchange tensors."""
    return [line for line in program(results, name) if "over" in line]


def check_parts_of_the_state(results: Results) -> None:
    """Each process has its part for the two large weights of "adam in parts".

    The state of the small weights, and the count of updates, are whole.
    """
    large, small = 2 * 4 * (6 * 400 + 400 * 3), 2 * 4 * 403 + 4
    padding = 2 * 4 * 64  # of each part, at most
    for own in results:
        kept = own["adam in parts"]["kept"]["OPTSTATE"] - small
        assert large <= len(results) * kept <= large + len(results) * padding


class Job(NamedTuple):
    """A job of several processes that has ended."""

    results: Results
    printed: str
    """What process 0 printed."""
    saved: Path
    """The file with the model of the case SAVED."""


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of four processes."""
    folder = tmp_path_factory.mktemp("four")
    return Job(*job(folder, 4, FEW[4]), folder / "saved.poptorch")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of two processes."""
    folder = tmp_path_factory.mktemp("two")
    return Job(*job(folder, 2, FEW[2]), folder / "saved.poptorch")


@pytest.fixture(scope="module")
def two_with_more(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Return a job of two processes with more cases."""
    folder = tmp_path_factory.mktemp("more")
    return Job(*job(folder, 2, MORE), folder / "saved.poptorch")


# Four processes.


@pytest.mark.larger("test_two_processes_train_as_one")
@pytest.mark.spec("parallel", 36)
@pytest.mark.parametrize("name", FEW[4])
def test_four_processes_train_as_one(name: str, four: Job) -> None:
    compare(four.results, name)


@pytest.mark.larger("test_each_of_two_processes_has_its_part_of_the_optimizer_state")
@pytest.mark.spec("parallel", 36)
def test_each_of_four_processes_has_its_part_of_the_optimizer_state(four: Job) -> None:
    check_parts_of_the_state(four.results)


@pytest.mark.larger("test_two_processes_with_parts_of_the_state_scatter_gradients_gather_weights")
@pytest.mark.spec("parallel", 36)
def test_four_processes_with_parts_of_the_state_scatter_gradients_gather_weights(four: Job) -> None:
    assert exchanges(four.results, "adam in parts") == [
        "scatter accum.* mean over 4 processes",
        "reduce accum.* mean over 4 processes",
        "gather param.* over 4 processes",
    ]


@pytest.mark.full("needs four processes: two models on two processes each")
@pytest.mark.spec("parallel", 36)
def test_replicas_cannot_exchange_where_stages_are_on_several_processes(four: Job) -> None:
    for own in four.results:
        assert "whose stages are on several processes cannot exchange" in own["refused"]["text"]


# Two processes.


@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize("name", FEW[2])
def test_two_processes_train_as_one(name: str, two: Job) -> None:
    compare(two.results, name)


@pytest.mark.larger("test_two_processes_train_as_one")
@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize("name", MORE)
def test_two_processes_train_more_models_as_one(name: str, two_with_more: Job) -> None:
    compare(two_with_more.results, name)


@pytest.mark.spec("parallel", 36)
def test_each_of_two_processes_has_its_part_of_the_optimizer_state(two: Job) -> None:
    check_parts_of_the_state(two.results)


@pytest.mark.spec("parallel", 36)
def test_two_processes_with_parts_of_the_state_scatter_gradients_gather_weights(two: Job) -> None:
    assert exchanges(two.results, "adam in parts") == [
        "scatter accum.* mean over 2 processes",
        "reduce accum.* mean over 2 processes",
        "gather param.* over 2 processes",
    ]


@pytest.mark.spec("parallel", 31, 36)
def test_a_message_says_why_state_is_not_divided(two: Job) -> None:
    assert "because updated weights or their gradients are anchored" in two.printed


@pytest.mark.larger("test_a_message_says_why_state_is_not_divided")
@pytest.mark.spec("parallel", 31, 36)
def test_a_message_says_why_the_state_of_a_traced_step_is_not_divided(two_with_more: Job) -> None:
    reason = "Adafactor.step does not update every weight element by element"

    assert reason in two_with_more.printed


@pytest.mark.spec("parallel", 31, 36)
def test_the_plan_shows_the_exchanges(two: Job) -> None:
    assert "reduce accum.* sum over 2 processes" in program(two.results, "sgd, sum")


@pytest.mark.larger("test_the_plan_shows_the_exchanges")
@pytest.mark.spec("parallel", 31, 36)
def test_the_plan_shows_the_exchanges_of_a_traced_step(two_with_more: Job) -> None:
    lines = program(two_with_more.results, "nadam in parts, traced")

    assert "gather param.* over 2 processes" in lines


@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize(
    "name, regions", [("sgd, sum", 1), ("adamw, clipped, anchors", 2), ("machines", 0)]
)
def test_processes_of_one_machine_exchange_in_common_memory(
    name: str, regions: int, two: Job
) -> None:
    """Processes on two machines have no common memory; anchors have separate regions."""
    assert [own[name]["kept"]["regions"] for own in two.results] == [regions, regions]


@pytest.mark.larger("test_the_plan_shows_the_exchanges")
@pytest.mark.spec("parallel", 31, 36)
def test_a_sum_of_squares_is_exchanged_in_one_bucket(two_with_more: Job) -> None:
    line = "reduce squares sum over 2 processes  # 1 bucket, 8 bytes"

    assert line in program(two_with_more.results, "adamw in parts, clipped, float64", "\n")


@pytest.mark.larger("test_the_plan_shows_the_exchanges")
@pytest.mark.spec("parallel", 31, 36)
def test_several_sums_of_squares_are_exchanged_in_one_bucket(two_with_more: Job) -> None:
    line = "reduce squares sum over 2 processes  # 1 bucket, 24 bytes"

    assert line in program(two_with_more.results, "lamb in parts", "\n")


@pytest.mark.larger("test_the_plan_of_two_machines_exchanges_while_gradients_are_computed")
@pytest.mark.spec("parallel", 31, 36)
def test_the_plan_of_one_machine_exchanges_after_all_micro_batches(two_with_more: Job) -> None:
    name = "sgd, combined, chunks"

    assert program(two_with_more.results, name) == [
        "repeat 2 iterations",
        "repeat 2 chunks of 4 lanes",
        "run micro(param.*, batch[i,c,4 lanes], accum.*) -> loss, output.*, accum.* +=",
        "reduce accum.* mean over 2 processes",
        "run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, accum.*, optstate.*",
        "emit loss, output.* final",
    ]
    assert "nothing overlaps" in program(two_with_more.results, name, "\n")[3]


@pytest.mark.spec("parallel", 31, 36)
def test_the_plan_of_two_machines_exchanges_while_gradients_are_computed(two: Job) -> None:
    reduce = "reduce accum.* mean over 2 processes  # 1 bucket,"

    assert program(two.results, "machines", ";") == [
        "repeat 2 iterations",
        "run gradients(param.*, batch[i,2 lanes], accum.*) -> loss, output.*, accum.*, value.*",
        f"{reduce} 358912 bytes, while the next graph runs",
        "run gradients left(param.*, batch[i,2 lanes], accum.*, value.*) -> accum.*",
        f"{reduce} 724992 bytes, after all gradients",
        "run update(param.*, accum.*, optstate.*, hyper.*) -> param.*, optstate.*",
        "emit loss, output.* final",
    ]
    whole_lines = program(two.results, "machines", "\n")
    assert "; 358912 bytes overlap; update divides" in whole_lines[4]


@pytest.mark.larger("test_the_plan_of_two_machines_exchanges_while_gradients_are_computed")
@pytest.mark.spec("parallel", 31, 36)
def test_the_plan_of_replicas_that_exchange_overlaps_nothing(two_with_more: Job) -> None:
    whole = "".join(program(two_with_more.results, "exchanges over processes", "\n"))

    assert "nothing overlaps" in whole


# Two processes that share the stages of one model.


@pytest.mark.spec("parallel", 31, 36)
@pytest.mark.parametrize("kind, common", [("PARAM", 0), ("OPTSTATE", 8)])
def test_processes_that_share_stages_have_only_the_state_of_their_stages(
    kind: str, common: int, two: Job
) -> None:
    """A count and a scale are on every chip."""
    alone = job_cases.run(CASES[SAVED], 0, 2, alone=True)

    kept = [own[SAVED]["kept"][kind] - common for own in two.results]

    assert sum(kept) == alone.kept[kind] - common
    assert 0 < min(kept) < max(kept) < sum(kept)


@pytest.mark.spec("parallel", 31, 36)
def test_processes_that_share_stages_are_refused_different_batches(two: Job) -> None:
    message = "process 1 received a batch that differs from that of process 0"
    for own in two.results:
        assert message in own[SAVED]["refused"]


@pytest.mark.spec("parallel", 31, 36)
def test_processes_that_share_stages_have_one_scale_of_the_loss(two: Job) -> None:
    first, second = (own[SAVED]["state"]["lossScaleUpdateFactor"] for own in two.results)

    assert first == second
    assert first > 1


@pytest.mark.spec("parallel", 31, 36)
def test_a_model_whose_stages_are_on_several_processes_is_saved_whole(two: Job) -> None:
    model = CASES[SAVED].model(1).half()
    optimizer = CASES[SAVED].optimizer(model.parameters())

    loaded = poptorch.load(two.saved, model=model, optimizer=optimizer)

    trained = two.results[0][SAVED]
    assert loaded.options.Distributed.stage_processes == 1
    for key, weight in model.state_dict().items():
        assert torch.equal(weight, trained["weights"][key]), key
    for key, value in optimizer.state_dict()["ipu_state"].items():
        assert torch.equal(value, trained["state"][key]), key
    loaded.destroy()


# Processes that are lost or differ.


@pytest.mark.long
def test_a_killed_job_continues_from_the_checkpoint_of_all_stages(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir()
    broken.mkdir()
    undisturbed = jobs.run("helpers.job_killed", [whole, 2], 2, whole)
    job_killed.plan(broken, {"victim": 1, "moment": "in a call", "times": 7})
    first = jobs.run("helpers.job_killed", [broken, 2], 2, broken)
    assert [code for code, _ in first.values()] == [1, -signal.SIGKILL]
    restarted = jobs.run("helpers.job_killed", [broken, 2], 2, broken)
    assert all("from step 6" in text for _, text in restarted.values())
    (weights,) = digests(text for _, text in undisturbed.values())
    assert digests(text for _, text in restarted.values()) == {weights}


@pytest.mark.parametrize(
    "what, message",
    [
        ("killed", "it was killed, or its machine is lost"),
        ("raised", "it ended with ValueError: no more data"),
        (
            "changed alone",
            "another point of the program: it exchanges the numbers of the optimizer",
        ),
        long("killed while compiling", ""),
        long("stopped", "no sign of life for 6 s"),
        long("killed between stages", "it was killed, or its machine is lost"),
        long("interrupted between stages", "this process was interrupted by KeyboardInterrupt"),
        long(
            "state loaded alone", "point of the program: it exchanges the numbers of the optimizer"
        ),
        long("weights written alone", "it exchanges digests of the weights that were written"),
    ],
)
def test_a_lost_process_is_named_by_the_others(what: str, message: str, tmp_path: Path) -> None:
    assert jobs.status(*jobs.start("helpers.job_fault", [what], 2, tmp_path)) == 1
    text = jobs.printed(tmp_path, 0)
    assert "poptorch.Error: 'poptorch_py_error': Process 1 of the job is lost" in text
    assert "process 1 of 2: " in text
    assert message in text


class Different(NamedTuple):
    """The message of each process about each difference, and its whole output."""

    messages: list[dict[str, str]]
    texts: list[str]


@pytest.fixture(scope="module")
def different(tmp_path_factory: pytest.TempPathFactory) -> Different:
    """Return what two processes say that differ in one thing after another."""
    folder = tmp_path_factory.mktemp("different")
    messages, texts = [], []
    for code, text in jobs.run("helpers.job_fault", ["differences"], 2, folder).values():
        assert code == 0, text
        _, *parts = re.split(f"(?:{'|'.join(DIFFERENCES)}): ", text)
        messages.append(dict(zip(DIFFERENCES, parts, strict=True)))
        texts.append(text)
    return Different(messages, texts)


each_process = pytest.mark.parametrize("process", [0, 1])


@each_process
@pytest.mark.parametrize(
    "difference, phrases",
    [
        (
            "other program",
            ["do not train the same program", "in process 1, ", "in process 0", "operator"],
        ),
        ("other rate", ["hyper.0.lr: 0.5 in process 1, 0.1 in process 0"]),
        (
            "other length",
            ["data for different numbers of calls", "process 0: 4 calls; process 1: 2 calls"],
        ),
        (
            "other last batch",
            [
                "last batches of the processes of this job differ in size",
                "process 0: 4 rows; process 1: 3 rows",
            ],
        ),
        ("other weights", ["start with different weights", "param.layer.weight: "]),
        ("other numbers", ["hyper.0.lr: 0.3"]),
        (
            "other order",
            [
                "shuffle the same data set with different seeds",
                "process 0: seed 3; process 1: seed 4",
            ],
        ),
        (
            "other written weights",
            [
                "have written different weights to their devices",
                "param.layer.weight: ",
                " in process 1, ",
            ],
        ),
        ("other loaded state", ["___layer.weight: "]),
    ],
)
def test_processes_that_differ_stop_with_an_error_that_says_in_what(
    difference: str, phrases: list[str], process: int, different: Different
) -> None:
    for phrase in phrases:
        assert phrase in different.messages[process][difference]


@each_process
def test_the_error_shows_a_differing_number_of_both_processes(
    process: int, different: Different
) -> None:
    message = different.messages[process]["other numbers"].replace("0.30000000000000004", "0.3")

    assert "hyper.0.lr: 0.3 in process 1, 0.2 in process 0" in message


@each_process
@pytest.mark.parametrize(
    "difference, other", [("other written weights", "bias"), ("other loaded state", "hyper.")]
)
def test_equal_settings_of_processes_are_not_named(
    difference: str, other: str, process: int, different: Different
) -> None:
    assert other not in different.messages[process][difference]


@each_process
def test_a_script_can_continue_after_differences_were_refused(
    process: int, different: Different
) -> None:
    assert "trained 3.0" in different.texts[process]


@each_process
def test_the_error_names_a_process_with_another_seed(process: int, different: Different) -> None:
    has_warning = "process 0 of the job has another seed" in different.texts[process]

    assert has_warning == (process == 1)


@pytest.mark.parametrize(
    "what, message",
    [
        long("another is killed", "process 1 of 3: no sign of life for 3 s"),
        (
            "it is killed",
            "process 0 of 3: it stored the messages of the processes, and the "
            "connection to it is closed",
        ),
        long(
            "it is stopped",
            "process 0 of 3: it stored the messages of the processes, and no sign of life for 3 s",
        ),
    ],
)
def test_a_lost_process_is_named_after_the_process_with_the_store_has_ended(
    what: str, message: str, tmp_path: Path
) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path, **jobs.NETWORK)
    assert jobs.status(*reversed(processes)) == 1, jobs.printed(tmp_path, 2)
    text = jobs.printed(tmp_path, 2)
    assert "of the job is lost" in text
    assert message in text
    assert "process 2 was waiting to exchange second texts" in text


@pytest.mark.parametrize("what", ["a member is killed", long("a member is stopped")])
def test_on_one_machine_every_lost_process_is_named(what: str, tmp_path: Path) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path)

    assert jobs.status(*reversed(processes)) == 1, jobs.printed(tmp_path, 2)
    text = jobs.printed(tmp_path, 2)
    assert "process 0 of 3: no sign of life for 3 s" in text
    assert "process 2 was waiting to exchange second texts" in text


@pytest.mark.parametrize("where", [{}, jobs.NETWORK])
def test_the_process_with_the_store_ends_after_the_others_have_read(
    where: dict[str, str], tmp_path: Path
) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path, **where)
    assert {text for _, text in ended.values()} == {"3 texts\n"}
    assert {status for status, _ in ended.values()} == {0}


def test_a_job_on_one_machine_that_has_ended_leaves_nothing(tmp_path: Path) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path)

    assert {status for status, _ in ended.values()} == {0}
    assert [*(tmp_path / "job").iterdir()] == []
