"""``poptorch doctor`` without a script: what it finds right and wrong on a machine."""

import types
from pathlib import Path
from typing import Any

import pytest

from poptorch._base import env, resources
from poptorch._cli import doctor_machine
from poptorch._cli.main import main

PLENTY = 64 << 30


@pytest.fixture(autouse=True)
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(doctor_machine, "WATCHED", 0.06)
    monkeypatch.setattr(
        doctor_machine.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=PLENTY)
    )
    monkeypatch.setattr(resources, "available_memory", lambda: PLENTY)
    monkeypatch.setattr(doctor_machine, "_cores", lambda: 64.0)
    monkeypatch.setattr(env, "unknown", list)
    return tmp_path


def examined(capsys: Any) -> tuple[int, str]:
    status = main(["doctor"])
    return status, capsys.readouterr().out


@pytest.mark.slow
def test_a_healthy_machine_has_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    status, text = examined(capsys)

    subjects = [line.split()[0] for line in text.splitlines() if line[:1].islower()]
    assert subjects == ["torch", "compiler", "caches", "threads", "memory"]
    assert "\nNothing is wrong." in text
    assert status == 0


def compiler_that_fails(folder: Path) -> str:
    file = folder / "failing-g++"
    file.write_text("#!/bin/sh\necho 'fatal error: omp.h: No such file' >&2; exit 1\n")
    file.chmod(0o755)
    return str(file)


BROKEN = {
    "no compiler": (
        lambda patch, folder: patch.setenv("CXX", "nowhere-g++"),
        "compiler   WRONG: there is no C++ compiler 'nowhere-g++'",
        "Fix: install g++, or set CXX",
    ),
    "a compiler without OpenMP": (
        lambda patch, folder: patch.setenv("CXX", compiler_that_fails(folder)),
        "fails: fatal error: omp.h: No such file",
        "Fix: install headers and OpenMP",
    ),
    "a cache that others can write to": (
        lambda patch, folder: folder.chmod(0o777),
        "compiled code is not kept for later runs",
        "Fix: set TORCHINDUCTOR_CACHE_DIR to a folder",
    ),
    "a file where a cache should be": (
        lambda patch, folder: patch.setenv("POPTORCH_CACHE_DIR", __file__),
        "POPTORCH_CACHE_DIR=",
        "Fix: set POPTORCH_CACHE_DIR to a folder",
    ),
    "a full disk": (
        lambda patch, folder: patch.setattr(doctor_machine, "LEAST_DISK", 2 * PLENTY),
        "MiB of disk are free for",
        "Fix: run poptorch cache trim",
    ),
    "too many threads": (
        lambda patch, folder: patch.setattr(doctor_machine, "_cores", lambda: 0.5),
        "for 0.5 cores",
        "Fix: export OMP_NUM_THREADS=1",
    ),
    "little memory": (
        lambda patch, folder: patch.setattr(resources, "available_memory", lambda: 1 << 20),
        "memory     WRONG: 0.0 GiB free",
        "Fix: end other programs",
    ),
    "a typing error": (
        lambda patch, folder: patch.setattr(env, "unknown", lambda: ["POPTORCH_CASHE_DIR"]),
        "variables  WRONG: POPTORCH_CASHE_DIR has no effect",
        "Fix: unset POPTORCH_CASHE_DIR",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("broken", BROKEN)
def test_each_problem_is_reported_with_a_remedy(
    broken: str, healthy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks, message, fix = BROKEN[broken]
    monkeypatch.setattr(doctor_machine.torch, "get_num_threads", lambda: 2)
    breaks(monkeypatch, healthy)

    status, text = examined(capsys)

    assert message in text
    assert fix in text
    assert "\nOne thing is wrong." in text
    assert status == 1
