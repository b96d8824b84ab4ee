"""``poptorch doctor``, ``options``, ``estimate`` and ``report``; ``gc-monitor`` and ``gc-info``."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import poptorch
from helpers import programs
from helpers.source_tree import ROOT
from poptorch import _pod
from poptorch._cli import gc_tools
from poptorch._cli.gc_tools import box, info, monitor
from poptorch._cli.main import main
from poptorch._ipu_model.parts import Culprit
from poptorch._ipu_model.profile import FORMAT
from poptorch.backends.inductor import libraries

EXAMPLES = ROOT / "examples" / "doctor"
UNDECIDED, WAITING = str(EXAMPLES / "undecided.py"), str(EXAMPLES / "waiting.py")


def lines_of(file: str, *codes: str) -> list[str]:
    """``file.py:12, code`` of the lines that begin so, by place."""
    found = []
    for number, line in enumerate(Path(file).read_text().splitlines(), 1):
        if line.strip().startswith(codes):
            found.append(f"{Path(file).name}:{number}, {line.strip()}")
    return found


def test_a_script_is_explained_to_the_last_construct(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", UNDECIDED]) == 1
    out = capsys.readouterr().out
    assert "Undecided, inference, called at undecided.py:" in out
    assert "2 of 5 findings prevent compiling this model" in out
    troubles = ("x = x - x.mean()", "if x.mean()", 'print("after', "active = x[", "return active")
    for line in lines_of(UNDECIDED, *troubles):
        assert out.count(line) == 1
    assert "After the first" not in out  # it was stopped before the first call


@pytest.mark.slow
def test_a_script_that_trains_is_told_what_limits_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--calls", "6", WAITING]) == 0
    out = capsys.readouterr().out
    assert "\nClassifier, training, called at waiting.py:" in out
    assert "Nothing prevents capturing this model." in out
    verdict = re.search(r"first of 6 calls: (\S+) s of (\S+) s .* the host limits the run", out)
    assert verdict is not None
    waited, total = map(float, verdict.groups())
    assert 5 * 16 * 0.002 * 0.9 <= waited <= total


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Any]:
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


def test_a_model_that_cannot_be_compiled_ends_the_script(
    script: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_script_runs_to_its_end_with_its_arguments(
    script: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    before = dict(vars(poptorch.PoplarExecutor)), dict(vars(poptorch.DataLoader))
    assert main(["doctor", script(LOOP), "3"]) == 0
    out = capsys.readouterr().out
    assert "the end\n" in out
    assert re.search(r"After the first of 3 calls: \d+% of .* No poptorch.DataLoader was used", out)
    assert main(["doctor", "--calls", "2", script(LOOP), "3"]) == 0
    assert "the end\n" not in capsys.readouterr().out
    main(["doctor", script(LOOP), "1"])
    assert "1 calls are too few" in capsys.readouterr().out
    assert main(["doctor", script("1 / 0")]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert main(["doctor", script("sys.exit(3)")]) == 1
    # Afterwards nothing is watched.
    assert dict(vars(poptorch.PoplarExecutor)) == before[0]
    assert dict(vars(poptorch.DataLoader)) == before[1]


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


@pytest.mark.parametrize("arguments, status, said", [
    ([f"{UNDECIDED}:Undecided", "8,4"], 1, "findings prevent compiling this model"),
    (["--training", f"{WAITING}:Classifier", "4,8", "4:int64"], 0, "Nothing prevents capturing"),
    ([f"{UNDECIDED}:Undecided"], 0, "1 finding, which is relevant if its line runs:\n"
     + SUBTRACTION),
    (["--calls", "3", "FILE", "--epochs", "1"], 2,
     "Running FILE --epochs 1, until 3 calls of wrapped models\nat the top\n"),
    (["FILE:made"], 0, "Importing FILE, to create made and search its source\nat the top\n"),
    (["FILE:torchs"], 0, "If you pass shapes, forward is also tried"),
    (["FILE:made", "3,2"], 0, "Importing FILE, to create made and run its forward once\n"),
    (["FILE:Product", "2,3"], 1, "mat1 and mat2 shapes cannot be multiplied"),
    (["FILE:Refusing", "2,3"], 1, "ValueError: rows of three only"),
    (["--training", "FILE:Named", "rows=4,3", "labels=4:int64"], 0, "Nothing prevents capturing"),
    (["--training", "FILE:Named", "rows=4,3"], 1, "error: Couldn't find a loss in graph"),
])  # fmt: skip
def test_what_is_explained_is_said_before_it_runs(
    arguments: list[str],
    status: int,
    said: str,
    script: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = script(MODULES)
    assert main(["doctor", *(word.replace("FILE", file) for word in arguments)]) == status
    assert said.replace("FILE", file) in capsys.readouterr().out


def test_a_file_that_fails_is_shown_without_our_own_frames(script: Callable[..., Any]) -> None:
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
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is installed beside torch."""
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    (folder / "acme").mkdir(parents=True)
    (folder / "acme" / "layers.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(folder)
    yield
    for name in ("acme", "acme.layers"):
        sys.modules.pop(name, None)


def test_lines_inside_other_packages_are_named(
    package, script: Callable[..., Any], capsys: pytest.CaptureFixture[str]
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
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(libraries, "_COMMON", [(64, 256, 256)])
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert main(["doctor", "--calibrate"]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row[:13] for row in rows] == [f"64x256x256 {lies}" for lies in ("nn", "np", "nt", "tn")]


def test_each_command_has_a_help_page_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [["doctor"], ["cache"], ["cache", "list"], ["cache", "explain"], ["cache", "trim"]]
    for words in pages:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        assert "example:\n  poptorch " + words[0] in capsys.readouterr().out


def test_nobody_who_reads_on_is_no_error(
    script: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_wrong_use_is_said_in_one_line(
    arguments: list[str],
    phrase: str,
    script: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = script("class Net(torch.nn.Linear): pass\n")
    assert main(["doctor", *(word.replace("FILE", file) for word in arguments)]) == 2
    assert phrase.replace("FILE", file) in capsys.readouterr().err


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert "deviceIterations = 1" in text
    file = tmp_path / "options.cfg"
    file.write_text("deviceIterations(3)\n")
    main(["options", str(file)])
    assert "* N deviceIterations = 3" in capsys.readouterr().out
    main(["options", "--all"])
    assert len(capsys.readouterr().out.splitlines()) > len(text.splitlines())


@pytest.mark.parametrize(
    "text, says",
    [
        (None, ("No such file",)),
        ("deviceIterations(3)\n\nlambda: 4\n", ("line 3 of the file",)),
        ("# a comment\ndeviceIterations('4')\n", ("line 2 of options.cfg", "Unexpected type")),
        ("nonsense(4)\n", ("line 1 of options.cfg: nonsense(4)", "Invalid attribute")),
    ],
)
def test_a_faulty_file_is_an_error_with_its_line(
    text: str | None, says: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "options.cfg"
    if text is not None:
        file.write_text(text)
    assert main(["options", str(file)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    for part in says:
        assert part in printed.err


def test_faulty_options_are_named_and_the_command_is_no_line_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"nonsense": 4}')
    assert main(["options"]) == 2
    assert "POPTORCH_DEFAULT_OPTIONS" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", [__file__, "report", "nowhere"])
    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith("There is no profile in this path\n  Got:    nowhere")
    assert Path(__file__).name not in error


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--version"], 0, f"poptorch {poptorch.__version__}\n"),
        ([], 2, "command"),
    ],
)
def test_the_version_and_that_a_command_is_needed(
    words: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == status
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_module_is_the_command_and_a_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    program = programs.Program("-m", "poptorch", "options", stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as output:
        assert output.readline().startswith("N: changes results")
    program.wait()
    assert program.errors() == ""
    program.close()


SCRIPT = """
model = torch.nn.Linear(int(sys.argv[1]), 4)
poptorch.inferenceModel(model)(torch.ones(2, int(sys.argv[1])))
print("ran on")
"""


@pytest.fixture
def linear(script: Callable[..., Any]) -> str:
    return script(SCRIPT)


def test_the_first_model_is_priced_and_the_script_ends(
    linear: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, file = list(sys.argv), str(tmp_path / "estimate.json")
    assert main(["estimate", "--system", "mk2:1", "--json", file, linear, "8"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("script.py: Linear, inference, on mk2:1: 1 replicas of 1 IPUs")
    assert "ran on" not in shown
    assert sys.argv == before
    read = json.loads(Path(file).read_text())
    assert read["estimated"]["system"] == "mk2:1"
    assert read["name"] == "script.py: Linear, inference"
    assert main(["report", file]) == 0
    assert capsys.readouterr().out == shown  # the same lines and tables
    assert "aten.addmm" in shown


@pytest.mark.parametrize(
    "size, status, said",
    [
        (1 << 15, 1, "DOES NOT FIT: weights, 2.0 GiB"),
        (14640, 0, "limit): weights, 915.1 MiB"),
    ],
)
def test_what_does_not_fit_is_a_failure_a_close_one_is_not(
    size: int,
    status: int,
    said: str,
    script: Callable[..., Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = script(
        f"with torch.device('meta'): model = torch.nn.Linear({size}, 1 << 14)\n"
        f"poptorch.inferenceModel(model).compile(torch.empty(1, {size}, device='meta'))\n"
    )
    assert main(["estimate", file]) == status
    assert said in capsys.readouterr().out


def test_what_cannot_be_run_or_priced_is_one_message(
    linear: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.py").write_text("")
    for words, said in (
        (["--system", "x:2", linear, "8"], "There is no such system"),
        ([str(tmp_path / "none.py")], "There is no file"),
        ([str(tmp_path / "empty.py")], "used no wrapped model"),
        (["--processes", "8", linear, "8"], "needs the latency of the link"),
        (["--latency", "20us", linear, "8"], "need --processes"),
        (["--processes", "8", *LINK, "--all", linear, "8"], "cannot be combined with --all"),
    ):
        assert main(["estimate", *words]) == 2
        assert said in capsys.readouterr().err


LINK = ["--latency", "1ms", "--bandwidth", "1Gb"]


def test_a_curve_starts_from_calls_that_are_measured(
    script: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    file = script(
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x): return poptorch.identity_loss(super().forward(x), 'mean')\n"
        "options = poptorch.Options().backend('reference')\n"
        "poptorch.trainingModel(Net(8, 4), options)(torch.ones(2, 8))\n"
    )
    assert main(["estimate", "--processes", "2,64", *LINK, file]) == 0
    title, _, two, many = capsys.readouterr().out.splitlines()[-4:]
    said = "measured here (the median of 8); 512 B of gradients per update; a link with "
    assert title.endswith(f"{said}1 ms and 1 Gb/s (nothing was run)")
    assert re.search("4.24 ms .*latency +2.12 ms +4.24 ms +twice the accumulation [0-9.]+%", two)
    assert re.match("64 +267 ms +267 ms +[0-9.]+% +latency +12.7 ms +59.4 ms", many)


@pytest.mark.slow
def test_our_options_behind_the_script_are_said_to_be_the_scripts(
    linear, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPTORCH_POD")
    assert main(["estimate", linear, "8", "--system=mk2:1"]) == 0
    out, err = capsys.readouterr()
    assert "on mk2:64" in out
    assert "--system=mk2:1 comes after" in err
    assert main(["estimate", "--all", linear, "8"]) == 0
    out, err = capsys.readouterr()
    assert "comes after" not in err
    assert out.index("Linear, inference, on mk2:64") < out.index("ran on")


def made(directory: Path, cycles: float, size: float) -> str:
    """A profile with what is printed and compared."""
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


def test_reports_are_printed_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = made(tmp_path / "old", 1000, 500), made(tmp_path / "new", 1015, 500)
    assert main(["report", old]) == 0
    out = capsys.readouterr().out
    assert out.startswith("net, on bow:1: 1 replicas of 1 IPUs")
    assert "\nfits: weights, 500 B on chip 0 at 0F0; 50 % of its memory\n" in out
    assert main(["report", "--compare", old, new]) == 0
    assert main(["report", "--compare", old, new, "--budget", "memory=3%,cycles=2%"]) == 0
    capsys.readouterr()
    assert main(["report", "--compare", old, new, "--budget", "memory=3%,cycles=1%"]) == 1
    assert "over budget: cycles +1.5%, allowed +1.0%" in capsys.readouterr().out
    assert main(["report", str(tmp_path)]) == 2
    assert f"one of {tmp_path / 'new'}" in capsys.readouterr().err
    assert main(["cache", "--dir", str(tmp_path / "nowhere"), "list"]) == 2
    assert main(["report"]) == 2
    assert main(["report", old, "--budget", "memory=3%"]) == 2
    for wrong in ("speed=1%", "cycles", "memory=1"):
        assert main(["report", "--compare", old, new, "--budget", wrong]) == 2


def test_reports_of_strangers_are_said_to_be_none_or_printed_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = Path(made(tmp_path / "odd", 1000, 500)) / "profile.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"name": "\x1b[2Jnet"}))
    assert main(["report", str(file)]) == 0
    assert "\\x1b[2Jnet, on bow:1" in capsys.readouterr().out
    for wrong in ("[" * 100_000, json.dumps(content | {"estimated": "\x1b"}), '{"format": 2}'):
        file.write_text(wrong)
        assert main(["report", str(file)]) == 2
    file.unlink()
    os.mkfifo(file)  # whoever opens it waits for ever
    assert main(["report", str(file)]) == 2
    assert "not a regular file" in capsys.readouterr().err


CARDS = """\
+---------------+---------------------------------------------------------------------------------+
|  gc-monitor   |        Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs        |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|    IPU-M    |       Serial       |IPU-M SW|Server version|  ICU FW  | Type  | ID | IPU# |Routing|
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|  10.1.5.7   | 0069.0002.8210521  |        |    1.9.0     |  2.4.4   | M2000 | 0  |  3   |  DNC  |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+"""


@pytest.fixture(autouse=True)
def _own_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POD_DIR", str(tmp_path))
    monkeypatch.setenv("POPTORCH_POD", "4")


def output(tool: Callable[..., Any], capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert tool(arguments) == 0
    return capsys.readouterr().out


def test_the_table_is_drawn_as_the_real_one() -> None:
    title = "Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs"
    row = ("10.1.5.7", "0069.0002.8210521", "", "1.9.0", "2.4.4", "M2000", "0", "3", "DNC")
    titles = [("gc-monitor", 15), (title, 81)]
    assert box(titles, gc_tools._CARD_WIDTHS, [gc_tools._CARD_HEAD, row]) == CARDS


def test_names_of_processes_say_nothing_to_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lease = _pod.acquire(1)
    (file,) = tmp_path.glob("*.json")
    entry = json.loads(file.read_text())
    entry["process"] |= {"command": "\x1b[2Jpython\n", "user": "a\tb"}
    file.write_text(json.dumps(entry))
    printed = output(monitor, capsys)
    assert "\\x1b[2Jpython\\n" in printed
    assert "a\\tb" in printed
    lease.release()


def test_monitor_shows_devices_and_processes(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(monitor, capsys)
    assert "Partition: virtual-mk2-4 [active] has 4 reconfigurable IPUs" in text
    assert text.count("| M2000 |") == 4
    serials = [line.split("|")[2].strip() for line in text.splitlines() if "M2000" in line]
    assert serials == 2 * ["0000.0002.0000000"] + 2 * ["0000.0001.0000000"]
    assert "No attached processes in partition virtual-mk2-4" in text
    lease, lines = _pod.acquire(2), output(monitor, capsys, "--no-card-info").splitlines()
    assert "Attached processes in partition virtual-mk2-4" in lines[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[5:-1]]
    assert [row[0] for row in rows] == [str(os.getpid())] * 2
    assert [row[4] for row in rows] == ["0", "1"]
    assert {row[5] for row in rows} == {"1330MHz"}
    assert {row[1] for row in rows} == {_pod.holders()[0].process.command}
    assert len({len(line) for line in lines}) == 1
    lease.release()


def test_facts_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    lease, facts = _pod.acquire(1), json.loads(output(monitor, capsys, "--json"))
    assert facts["partition"] == "virtual-mk2-4"
    assert facts["ipus"] == 4
    assert len(facts["cards"]) == 4
    (process,) = facts["processes"]
    assert process["pid"] == os.getpid()
    assert process["device"] == 0
    assert process["ipus"] == [0]
    assert "cards" not in json.loads(output(monitor, capsys, "-j", "--no-card-info"))
    lease.release()
    (facts,) = json.loads(output(info, capsys, "-d", "6", "-j"))
    assert facts["type"] == "group"
    assert facts["ipu_version"] == "ipu2"
    assert facts["held_by"] == []


def test_info_lists_devices_or_tells_about_one(capsys: pytest.CaptureFixture[str]) -> None:
    lease, text = _pod.acquire(2), output(info, capsys, "--list-devices")
    assert text == output(info, capsys)  # when it is asked for nothing
    lines = text.splitlines()
    assert len(lines) == 7
    assert lines[3] == "Id 3: single, IPU 3"
    assert lines[4] == f"Id 4: group, IPUs 0, 1, held by process {os.getpid()}"
    lease.release()
    text = output(info, capsys, "--device-id", "6")
    assert "ipus: [0, 1, 2, 3]" in text
    assert "tiles per ipu: 1472" in text
    assert info(["-d", "7"]) == 2
    assert "no device 7" in capsys.readouterr().err


def test_a_machine_without_devices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_POD", "0")
    assert "has 0 reconfigurable IPUs" in output(monitor, capsys)
    assert output(info, capsys, "-l") == "No IPU detected in virtual-mk2-0\n"
    monkeypatch.setenv("POPTORCH_POD", "nonsense")
    for tool, arguments in ((monitor, []), (info, ["-l"])):
        assert tool(arguments) == 2
        assert "POPTORCH_POD does not describe a system" in capsys.readouterr().err
