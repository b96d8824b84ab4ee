"""The process that keeps the store of a job ends before the others: they know who is to blame."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers import jobs
from helpers.cases import long

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "what, said",
    [
        long("another is killed", "process 1 of 3: no sign of life for 3 s"),
        ("it is killed", "process 0 of 3: it kept what the processes tell one another, and the "
         "connection to it is closed"),
        long("it is stopped", "process 0 of 3: it kept what the processes tell one another, and no "
         "sign of life for 3 s"),
    ],
)  # fmt: skip
def test_who_is_lost_is_named_after_the_keeper_has_gone(
    what: str, said: str, tmp_path: Path
) -> None:
    processes = jobs.start("helpers.job_keeper", [what], 3, tmp_path)
    try:
        assert jobs.status(processes[2]) == 1, jobs.printed(tmp_path, 2)
    finally:
        jobs.end(processes)
    text = jobs.printed(tmp_path, 2)
    assert "of the job is lost" in text
    assert said in text
    assert "process 2 waited for it to exchange second texts" in text


def test_who_keeps_the_store_ends_after_the_others_have_read(tmp_path: Path) -> None:
    ended = jobs.run("helpers.job_keeper", ["it is done"], 3, tmp_path)
    assert {text for _, text in ended.values()} == {"3 texts\n"}
    assert {status for status, _ in ended.values()} == {0}
