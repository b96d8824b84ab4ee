"""``poprun``: its options, and jobs that it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import jobs
from helpers.patience import HANGS
from poptorch._cli import poprun
from poptorch._cli.launching import KILLED

POPRUN = [sys.executable, "-m", "poptorch._cli.poprun"]
WHO = "import popdist; print(popdist.getInstanceIndex(), popdist.getNumTotalReplicas(), \
popdist.getNumLocalReplicas(), popdist.getNumIpusPerReplica())"


def job(*options: str, code: str = WHO, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*POPRUN, *options, sys.executable, "-c", code],
        env=jobs.environment(**more),
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.spec("parallel", 37)
def test_replicas_are_those_of_all_instances(tmp_path: Path) -> None:
    exported = tmp_path / "job.json"
    done = job(
        "--num-instances=2", "--num-replicas=6", "--ipus-per-replica=2", "--vipu-partition=p",
        "--print-topology=yes", f"--export-config={exported}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {"[0] 0 6 3 2", "[1] 1 6 3 2"} <= {*done.stdout.splitlines()}
    assert "1  localhost  3 to 5" in done.stdout
    assert "without effect here: --vipu-partition" in done.stderr
    stored = json.loads(exported.read_text())
    assert (stored["num_instances"], stored["num_replicas"]) == (2, 6)


@pytest.mark.slow
def test_a_killed_instance_is_named_and_the_others_end(tmp_path: Path) -> None:
    code = (
        "import os, popdist, signal\n"
        "print('started', flush=True)\n"
        "os.kill(os.getpid(), 9) if popdist.getInstanceIndex() == 1 else signal.pause()"
    )
    done = job("--num-instances=2", "--only-output-from-instance=0", code=code)
    assert done.returncode == KILLED + 9
    assert "instance 1 of 2 was killed by SIGKILL, the first to fail" in done.stderr
    assert "[1]" not in done.stdout


@pytest.mark.slow
def test_a_job_starts_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    code = (
        "import os, pathlib, popdist\n"
        f"mark = pathlib.Path({str(mark)!r})\n"
        "if popdist.getInstanceIndex() == 1 and not mark.exists():\n"
        "    mark.touch()\n"
        "    os._exit(4)\n"
        "print('done')"
    )
    done = job("--num-instances=2", "--max-restarts=1", code=code)
    assert done.returncode == 0, done.stderr
    assert "[1] done" in done.stdout


@pytest.mark.slow
def test_other_hosts_are_reached_by_a_shell(tmp_path: Path) -> None:
    """A shell that runs its second argument here stands for ssh."""
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nexec sh -c "$2"\n')
    shell.chmod(0o755)
    done = job(
        "--host=localhost,other", "--num-instances=2", f"--port={jobs.free_port()}",
        POPTORCH_REMOTE_SHELL=str(shell),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"0", "1"}


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--num-instances=2", "--num-replicas=3", "true"], "must be a multiple"),
        (["--host=a,b", "--num-instances=3", "true"], "must be a multiple of the 2 hosts"),
        (["--num-instances=0", "true"], "at least 1"),
        (["--only-output-from-instance=1", "true"], "there are 1 instances"),
        (["--hostfile=/nowhere", "true"], "--hostfile"),
        (["--import-config=/nowhere", "true"], "--import-config"),
        (["--numa-aware=perhaps", "true"], "yes or no"),
        (["no-such-program"], "there is no program"),
        ([], "name the program"),
    ],
)
def test_what_cannot_be_started_is_said(arguments, said, capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        poprun.main(arguments)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_a_host_file_names_a_host_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("a slots=2  # the first\n\n# none\nb\n")
    reader = poprun.parser()
    values = vars(reader.parse_args([f"--hostfile={file}", "--num-instances=4", "true"]))
    made = poprun._job(reader, values)
    assert (made.hosts, made.here, made.replicas) == (("a", "b"), 2, 4)
    assert poprun.topology(made).splitlines()[3] == "       2  b  2 to 2"
