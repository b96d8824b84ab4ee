"""``poptorch doctor``: findings with lines, and what limited a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import poptorch
from helpers.source_tree import ROOT
from poptorch._cli.main import main

EXAMPLES = ROOT / "examples" / "doctor"
UNDECIDED, WAITING = str(EXAMPLES / "undecided.py"), str(EXAMPLES / "waiting.py")


def lines_of(file: str, *codes: str) -> list[str]:
    """``file.py:12, code`` of the lines that begin so, by place."""
    found = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.strip().startswith(codes):
            found.append(f"{Path(file).name}:{number}, {line.strip()}")
    return found


def test_a_script_is_explained_to_the_last_construct(capsys) -> None:
    assert main(["doctor", UNDECIDED]) == 1
    out = capsys.readouterr().out
    assert "Undecided, inference, called at undecided.py:" in out
    assert "2 of 5 findings prevent compiling this model" in out
    troubles = ("x = x - x.mean()", "if x.mean()", 'print("after', "active = x[", "return active")
    for line in lines_of(UNDECIDED, *troubles):
        assert out.count(line) == 1
    assert "calls" not in out  # it was stopped before the first


def test_a_script_that_trains_is_told_what_limits_it(capsys) -> None:
    assert main(["doctor", "--calls", "6", WAITING]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Classifier, training, called at waiting.py:")
    assert "Nothing stands in the way of capturing this model." in out
    verdict = re.search(r"first of 6 calls: (\S+) s of (\S+) s .* the host limits the run", out)
    assert verdict is not None
    waited, total = map(float, verdict.groups())
    assert 5 * 16 * 0.002 * 0.9 <= waited <= total


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> str:
        file = tmp_path / "script.py"
        file.write_text(f"import sys, torch, poptorch\n{text}")
        return str(file)

    return write


LOOP = """
opts = poptorch.Options().backend("reference")
model = poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 2))
print("the end")
"""


def test_a_script_runs_to_its_end_with_its_arguments(script, capsys) -> None:
    assert main(["doctor", script(LOOP), "3"]) == 0
    out = capsys.readouterr().out
    assert "the end\n" in out
    assert re.search(r"After the first of 3 calls: \d+% of .* No poptorch.DataLoader was used", out)
    assert main(["doctor", "--calls", "2", script(LOOP), "3"]) == 0
    assert "the end\n" not in capsys.readouterr().out


def test_afterwards_nothing_is_watched(script, capsys) -> None:
    before = dict(vars(poptorch.PoplarExecutor)), dict(vars(poptorch.DataLoader))
    main(["doctor", script(LOOP), "1"])
    assert (dict(vars(poptorch.PoplarExecutor)), dict(vars(poptorch.DataLoader))) == before
    assert "1 calls: too few" in capsys.readouterr().out


def test_a_script_that_fails_is_shown_failing(script, capsys) -> None:
    assert main(["doctor", script("1 / 0")]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert main(["doctor", script("sys.exit(3)")]) == 1
    assert main(["doctor", script("sys.exit()")]) == 0


def test_a_module_is_explained_without_its_script(capsys) -> None:
    assert main(["doctor", f"{UNDECIDED}:Undecided", "8,4"]) == 1
    out = capsys.readouterr().out
    assert "findings prevent compiling this model" in out
    assert main(["doctor", "--training", f"{WAITING}:Classifier", "4,8", "4:int64"]) == 0
    assert "Nothing stands in the way" in capsys.readouterr().out


def test_without_shapes_the_source_is_searched(capsys) -> None:
    assert main(["doctor", f"{UNDECIDED}:Undecided"]) == 0
    out = capsys.readouterr().out
    (line,) = lines_of(UNDECIDED, "x = x - x.mean()")
    assert f"1 findings, which matter if their lines run:\n{line}" in out


@pytest.mark.parametrize("arguments, phrase", [
    (["nowhere.py"], "There is no file nowhere.py"),
    ([f"{UNDECIDED}:Missing"], "is no torch.nn.Module"),
    ([f"{UNDECIDED}:Undecided", "4x3"], "4x3 is no shape"),
    ([f"{UNDECIDED}:Undecided", "4:nonsense"], "is no shape"),
])  # fmt: skip
def test_wrong_use_is_said_in_one_line(arguments, phrase: str) -> None:
    with pytest.raises(SystemExit, match=phrase):
        main(["doctor", *arguments])
