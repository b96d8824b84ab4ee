"""``poptorch doctor``: what prevents compiling a model, and what limits a run."""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import poptorch
from helpers.source_tree import ROOT
from poptorch._cli.main import main
from poptorch._cpu import product_libraries

Script = Callable[[str], str]
Printed = pytest.CaptureFixture[str]

EXAMPLES = ROOT / "examples" / "doctor"
UNDECIDED, WAITING = str(EXAMPLES / "undecided.py"), str(EXAMPLES / "waiting.py")


def lines_of(file: str, *codes: str) -> list[str]:
    """``file.py:12, code`` of the lines that begin so, by place."""
    found = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.strip().startswith(codes):
            found.append(f"{Path(file).name}:{number}, {line.strip()}")
    return found


def test_a_script_is_explained_to_the_last_construct(capsys: Printed) -> None:
    assert main(["doctor", UNDECIDED]) == 1
    out = capsys.readouterr().out
    assert "Undecided, inference, called at undecided.py:" in out
    assert "2 of 5 findings prevent compiling this model" in out
    troubles = ("x = x - x.mean()", "if x.mean()", 'print("after', "active = x[", "return active")
    for line in lines_of(UNDECIDED, *troubles):
        assert out.count(line) == 1
    assert "After the first" not in out  # it was stopped before the first call


@pytest.mark.slow
def test_doctor_explains_the_bottleneck_of_a_training_script(capsys: Printed) -> None:
    assert main(["doctor", "--calls", "6", WAITING]) == 0
    out = capsys.readouterr().out
    assert "\nClassifier, training, called at waiting.py:" in out
    assert "Nothing prevents capturing this model." in out
    verdict = re.search(
        r"first of 6 calls, waiting for data took (\S+) s of (\S+) s .* The host limits the run",
        out,
    )
    assert verdict is not None
    waited, total = map(float, verdict.groups())
    assert 5 * 16 * 0.002 * 0.9 <= waited <= total


LOOP = """
opts = poptorch.Options().backend("reference")
model = poptorch.inferenceModel(torch.nn.Linear(2, 2), opts)
for _ in range(int(sys.argv[1])):
    model(torch.ones(1, 2))
print("the end")
"""


def test_a_model_that_cannot_be_compiled_ends_the_script(script: Script, capsys: Printed) -> None:
    file = script("""
class Counted(torch.nn.Module):
    def forward(self, x):
        return x.nonzero()

for model in (torch.nn.Identity(), Counted(), torch.nn.ReLU()):
    try:
        poptorch.inferenceModel(model)(torch.ones(2))
    except poptorch.Error:
        print("caught")
""")
    assert main(["doctor", file]) == 1
    out = capsys.readouterr().out
    assert "Identity, inference" in out
    assert "Counted, inference" in out
    assert "ReLU" not in out
    assert "caught" not in out


def test_a_script_runs_to_its_end_with_its_arguments(script: Script, capsys: Printed) -> None:
    status = main(["doctor", script(LOOP), "3"])

    out = capsys.readouterr().out
    assert status == 0
    assert "the end\n" in out
    assert re.search(r"After the first of 3 calls: \d+% of .* No poptorch.DataLoader was used", out)


def test_a_script_ends_after_the_calls_that_are_asked_for(script: Script, capsys: Printed) -> None:
    status = main(["doctor", "--calls", "2", script(LOOP), "3"])

    assert status == 0
    assert "the end\n" not in capsys.readouterr().out


def test_one_call_is_not_enough_to_find_the_bottleneck_of_a_script(
    script: Script, capsys: Printed
) -> None:
    main(["doctor", script(LOOP), "1"])

    assert "1 calls are too few" in capsys.readouterr().out


def test_a_script_that_raises_is_a_failure_and_its_error_shown(
    script: Script, capsys: Printed
) -> None:
    status = main(["doctor", script("1 / 0")])

    assert status == 1
    assert "ZeroDivisionError" in capsys.readouterr().out


def test_a_script_that_exits_with_a_status_is_a_failure(script: Script) -> None:
    assert main(["doctor", script("sys.exit(3)")]) == 1


@pytest.mark.parametrize("watched", [poptorch.PoplarExecutor, poptorch.DataLoader])
def test_doctor_leaves_no_instrumentation_behind(watched: type, script: Script) -> None:
    before = dict(vars(watched))

    main(["doctor", script(LOOP), "3"])

    assert dict(vars(watched)) == before


MODULES = """
print("at the top")
made, torchs = torch.nn.Linear(2, 1), torch.nn.AdaptiveLogSoftmaxWithLoss(4, 4, [2])
class Product(torch.nn.Module):
    def forward(self, x):
        return x @ torch.ones(5, 2)
class Refusing(torch.nn.Module):
    def forward(self, x):
        raise ValueError("rows of three only")
class Named(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
    def forward(self, rows, labels=None):
        out = super().forward(rows)
        return out if labels is None else torch.nn.functional.cross_entropy(out, labels)
"""
(SUBTRACTION,) = lines_of(UNDECIDED, "x = x - x.mean()")


@pytest.mark.parametrize("arguments, status, expected", [
    ([f"{UNDECIDED}:Undecided", "8,4"], 1, "findings prevent compiling this model"),
    (["--training", f"{WAITING}:Classifier", "4,8", "4:int64"], 0, "Nothing prevents capturing"),
    ([f"{UNDECIDED}:Undecided"], 0, "1 finding, which is relevant if its line runs:\n"
     + SUBTRACTION),
    (["--calls", "3", "FILE", "--epochs", "1"], 2,
     "Running FILE --epochs 1, at most 3 calls of wrapped models\nat the top\n"),
    (["FILE:made"], 0, "Importing FILE, to create made and search its source\nat the top\n"),
    (["FILE:torchs"], 0, "If you pass shapes, forward is also tried"),
    (["FILE:made", "3,2"], 0, "Importing FILE, to create made and run its forward once\n"),
    (["FILE:Product", "2,3"], 1, "mat1 and mat2 shapes cannot be multiplied"),
    (["FILE:Refusing", "2,3"], 1, "ValueError: rows of three only"),
    (["--training", "FILE:Named", "rows=4,3", "labels=4:int64"], 0, "Nothing prevents capturing"),
    (["--training", "FILE:Named", "rows=4,3"], 1, "error: Couldn't find a loss in graph"),
])  # fmt: skip
def test_doctor_prints_explanations_before_the_script_runs(
    arguments: list[str],
    status: int,
    expected: str,
    script: Script,
    capsys: Printed,
) -> None:
    file = script(MODULES)
    assert main(["doctor", *(word.replace("FILE", file) for word in arguments)]) == status
    assert expected.replace("FILE", file) in capsys.readouterr().out


def test_a_file_that_fails_is_shown_without_our_own_frames(script: Script) -> None:
    with pytest.raises(SystemExit, match="ZeroDivisionError") as end:
        main(["doctor", f"{script('def fail(): 1 / 0' + chr(10) + 'fail()')}:model"])
    assert str(end.value).count(", line ") == 2


PACKAGE = """
import torch
class Branching(torch.nn.Module):
    def forward(self, x):
        if x.dim() > 5:
            x = x[x > 0]
        return x * x.sum().item()
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that is installed next to torch."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    (folder / "acme").mkdir(parents=True)
    (folder / "acme" / "layers.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("acme", "acme.layers"):
        sys.modules.pop(name, None)


def test_lines_inside_other_packages_are_named(
    package: None, script: Script, capsys: Printed
) -> None:
    file = script("""
from acme.layers import Branching
class Outer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Branching()
    def forward(self, x):
        return self.inner(x)
""")
    assert main(["doctor", f"{file}:Outer", "4,3"]) == 1
    out, inside = capsys.readouterr().out, "acme/layers.py:7, return x * x.sum().item()"
    assert f"script.py:9, return self.inner(x) (in {inside})\n    error: .item()" in out
    main(["doctor", f"{file}:Outer"])
    out = capsys.readouterr().out
    assert f"{inside}\n    error, if this line runs: .item() needs a tensor's value" in out


@pytest.mark.slow
def test_products_are_measured_again(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(product_libraries, "_COMMON", [(64, 256, 256)])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--calibrate"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row[:13] for row in rows] == [
        f"64x256x256 {layout}" for layout in ("nn", "np", "nt", "tn")
    ]


@pytest.mark.parametrize(
    "words", [["doctor"], ["cache"], ["cache", "list"], ["cache", "explain"], ["cache", "trim"]]
)
def test_each_command_has_a_help_page_with_an_example(words: list[str], capsys: Printed) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])

    assert "example:\n  poptorch " + words[0] in capsys.readouterr().out


def test_a_closed_pipe_is_not_an_error(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["doctor", script("for number in range(100000): print(number)")]) == 141


@pytest.mark.parametrize(
    "arguments, phrase",
    [
        (["nowhere.py"], "There is no file nowhere.py"),
        ([f"{UNDECIDED}:Missing"], "is neither a torch.nn.Module"),
        ([f"{UNDECIDED}:Undecided", "4x3"], "4x3 is not a shape"),
        ([f"{UNDECIDED}:Undecided", "4:nonsense"], "is not a shape"),
        (["FILE"], "To examine a module in this file: poptorch doctor FILE:NAME"),
    ],
)
def test_wrong_arguments_cause_an_error_of_one_line(
    arguments: list[str],
    phrase: str,
    script: Script,
    capsys: Printed,
) -> None:
    file = script("class Net(torch.nn.Linear): pass\n")
    assert main(["doctor", *(word.replace("FILE", file) for word in arguments)]) == 2
    assert phrase.replace("FILE", file) in capsys.readouterr().err
