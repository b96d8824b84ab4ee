"""What compiling costs does not grow unseen: counts, as times differ by more than changes do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import compile_cost

MOST = 1.1  # of a committed figure; who has reasons for more writes new ones
COMMITTED = json.loads(compile_cost.COUNTS.read_text())


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in compile_cost.NAMES[1:])],
)
def test_no_part_of_compiling_grows(name: str, tmp_path: Path) -> None:
    command = [sys.executable, compile_cost.__file__, name, "--counts", "--json", tmp_path / "new"]
    subprocess.run(command, check=True, capture_output=True)
    new = json.loads((tmp_path / "new").read_text())
    if new["conditions"] != COMMITTED["conditions"]:
        pytest.skip(f"the figures are of {COMMITTED['conditions']}, not {new['conditions']}")
    for part, count in COMMITTED["counts"][name].items():
        assert new["counts"][name][part] <= MOST * count, part
