"""``poptorch report``: reports of profiles, and their comparison."""

import dataclasses
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from poptorch._cli.main import main
from poptorch._ipu_model.parts import Culprit
from poptorch._ipu_model.profile import FORMAT

Printed = pytest.CaptureFixture[str]


def write_profile(directory: Path, cycles: float, size: float) -> str:
    """Write a profile with what is printed and compared; return its path."""
    chip = {"chip": 0, "peak": {"weights": size}, "peak_at": "0F0", "parts": {"compute": cycles}}
    chip |= {"limit": 2 * size, "cycles": cycles}
    culprit = dataclasses.asdict(Culprit(0, "0F0", "weights", "", "", "", size, -50.0))
    priced = {
        "system": "bow:1",
        "fits": True,
        "culprit": culprit,
        "items_per_second": 10.0,
        "verdict": "fits",
        "kind": "transformer",
        "seconds": 1.0,
        "cycles": cycles,
        "share_of_peak": 0.1,
        "chips": [chip],
        "operators": [],
        "clock": 1e9,
        "replicas": 1,
        "bound": {"compute": 1.0},
        "error_band": 1.5,
        "guesses": [],
        "advice": [],
    }
    content = {"format": FORMAT, "name": "net", "estimated": priced, "measured": None}
    directory.mkdir()
    (directory / "profile.json").write_text(json.dumps(content))
    return str(directory)


class Profiles(NamedTuple):
    """Two profiles in one folder; the new one has 1.5 % more cycles."""

    folder: Path
    old: str
    new: str


@pytest.fixture
def profiles(tmp_path: Path) -> Profiles:
    """Return two profiles."""
    old = write_profile(tmp_path / "old", 1000, 500)
    return Profiles(tmp_path, old, write_profile(tmp_path / "new", 1015, 500))


def test_a_report_is_printed(profiles: Profiles, capsys: Printed) -> None:
    status = main(["report", profiles.old])

    out = capsys.readouterr().out
    assert status == 0
    assert out.startswith("net, on bow:1: 1 replica of 1 IPU,")
    assert (
        "\nfits: chip 0 needs 50 % of its memory at 0F0; the largest part is weights, 500 B\n"
        in out
    )


@pytest.mark.parametrize("budget", [[], ["--budget", "memory=3%,cycles=2%"]])
def test_a_comparison_within_its_budget_is_a_success(budget: list[str], profiles: Profiles) -> None:
    assert main(["report", "--compare", profiles.old, profiles.new, *budget]) == 0


def test_a_comparison_over_its_budget_is_a_failure_that_says_by_how_much(
    profiles: Profiles, capsys: Printed
) -> None:
    budget = ["--budget", "memory=3%,cycles=1%"]

    status = main(["report", "--compare", profiles.old, profiles.new, *budget])

    assert status == 1
    assert "over budget: cycles +1.5%, allowed +1.0%" in capsys.readouterr().out


def test_a_folder_of_several_reports_is_refused_and_they_are_named(
    profiles: Profiles, capsys: Printed
) -> None:
    status = main(["report", str(profiles.folder)])

    assert status == 2
    remedy = capsys.readouterr().err.partition("Fix:")[2]
    assert str(profiles.folder / "new") in remedy
    assert str(profiles.folder / "old") in remedy


def test_a_report_without_a_path_is_refused() -> None:
    assert main(["report"]) == 2


def test_a_budget_without_a_comparison_is_refused(profiles: Profiles) -> None:
    assert main(["report", profiles.old, "--budget", "memory=3%"]) == 2


@pytest.mark.parametrize("budget", ["speed=1%", "cycles", "memory=1"])
def test_a_budget_that_cannot_be_read_is_refused(budget: str, profiles: Profiles) -> None:
    assert main(["report", "--compare", profiles.old, profiles.new, "--budget", budget]) == 2


def test_a_missing_cache_cannot_be_listed(tmp_path: Path) -> None:
    assert main(["cache", "--dir", str(tmp_path / "nowhere"), "list"]) == 2


# Files of strangers.


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    """Return the file of a profile."""
    return Path(write_profile(tmp_path / "odd", 1000, 500)) / "profile.json"


def test_names_in_a_report_say_nothing_to_a_terminal(profile: Path, capsys: Printed) -> None:
    content = json.loads(profile.read_text())
    profile.write_text(json.dumps(content | {"name": "\x1b[2Jnet"}))

    status = main(["report", str(profile)])

    assert status == 0
    assert "\\x1b[2Jnet, on bow:1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, json.dumps({"format": FORMAT, "estimated": "\x1b"}), '{"format": 2}'],
    ids=["nested too deep", "no estimate", "another format"],
)
def test_a_file_that_is_not_a_report_is_refused(text: str, profile: Path) -> None:
    profile.write_text(text)

    assert main(["report", str(profile)]) == 2


def test_a_pipe_in_the_place_of_a_report_is_refused(profile: Path, capsys: Printed) -> None:
    """Opening the pipe would block forever."""
    profile.unlink()
    os.mkfifo(profile)

    status = main(["report", str(profile)])

    assert status == 2
    assert "not a regular file" in capsys.readouterr().err
