"""Processes that are lost, the store's too, or unlike the others: nobody waits, all are named."""

import re

import pytest

from helpers import jobs
from helpers.cases import long
from helpers.job_fault import DIFFERENCES

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("what, said", [
    ("killed", "it was killed, or its machine is gone"),
    ("raised", "it ended by ValueError: no more data"),
    ("changed alone", "it does something else: it exchanges the numbers of the optimizer"),
    long("killed while compiling", ""), long("stopped", "no sign of life for 6 s"),
    long("killed between stages", "it was killed, or its machine is gone"),
    long("interrupted between stages", "its part was interrupted by KeyboardInterrupt"),
    long("state loaded alone", "something else: it exchanges the numbers of the optimizer"),
    long("weights written alone", "it exchanges digests of the weights that were written"),
])  # fmt: skip
def test_a_lost_process_is_named_by_the_others(what: str, said: str, tmp_path) -> None:
    processes = jobs.start("helpers.job_fault", [what], 2, tmp_path)
    try:
        assert jobs.status(processes[0]) == 1
    finally:
        jobs.end(processes)
    text = jobs.printed(tmp_path, 0)
    assert "poptorch.Error: 'poptorch_py_error': Process 1 of the job is lost" in text
    assert "process 1 of 2: " in text
    assert said in text


def test_processes_that_differ_stop_with_an_error_that_says_in_what(tmp_path) -> None:
    for index, (code, text) in jobs.run("helpers.job_fault", ["differences"], 2, tmp_path).items():
        assert code == 0, text
        parts = re.split(f"(?:{'|'.join(DIFFERENCES)}): ", text)
        _, program, rate, length, weights, numbers, order, written, loaded = parts
        assert "do not train the same program" in program
        assert "process 1, against process 0" in program
        assert "operator" in program
        assert "hyper.0.lr: 0.5 here, 0.1 there" in rate
        assert "data for different numbers of calls" in length
        assert "process 0: 4; process 1: 2" in length
        assert "begin with other weights" in weights
        assert "param.layer.weight: " in weights
        assert "hyper.0.lr: 0.3 here, 0.2 there" in numbers.replace("0.30000000000000004", "0.3")
        assert "shuffle one data set by different seeds" in order
        assert "process 0: 3; process 1: 4" in order
        assert "have written other weights to their devices" in written
        assert "process 1, against process 0 ('there'): param.layer.weight: " in written
        assert "bias" not in written
        assert "___layer.weight: " in loaded
        assert "hyper" not in loaded
        assert "trained 3.0" in loaded
        assert ("process 0 of the job has another seed" in text) == (index == 1)


@pytest.mark.parametrize("what, said", [
    long("another is killed", "process 1 of 3: no sign of life for 3 s"),
    ("it is killed", "process 0 of 3: it kept what the processes tell one another, and the "
     "connection to it is closed"),
    long("it is stopped", "process 0 of 3: it kept what the processes tell one another, and no "
     "sign of life for 3 s"),
])  # fmt: skip
def test_who_is_lost_is_named_after_the_keeper_has_gone(what: str, said: str, tmp_path) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path)
    try:
        assert jobs.status(processes[2]) == 1, jobs.printed(tmp_path, 2)
    finally:
        jobs.end(processes)
    text = jobs.printed(tmp_path, 2)
    assert "of the job is lost" in text
    assert said in text
    assert "process 2 waited for it to exchange second texts" in text


def test_who_keeps_the_store_ends_after_the_others_have_read(tmp_path) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path)
    assert {text for _, text in ended.values()} == {"3 texts\n"}
    assert {status for status, _ in ended.values()} == {0}
