"""``poptorch estimate`` and ``report``; ``gc-monitor`` and ``gc-info``."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import pytest

from poptorch import _pod
from poptorch._cli import gc_tools
from poptorch._cli.gc_tools import box, info, monitor
from poptorch._cli.main import main
from poptorch._ipu_model.parts import Culprit
from poptorch._ipu_model.profile import FORMAT

SCRIPT = """
import sys
import torch, poptorch
model = torch.nn.Linear(int(sys.argv[1]), 4)
poptorch.inferenceModel(model)(torch.ones(2, int(sys.argv[1])))
print("ran on")
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_the_first_model_is_priced_and_the_script_ends(script: str, tmp_path, capsys) -> None:
    before = list(sys.argv)
    file = str(tmp_path / "estimate.json")
    assert main(["estimate", "--system", "mk2:1", "--json", file, script, "8"]) == 0
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


@pytest.mark.parametrize("size, status, said", [
    (1 << 15, 1, "DOES NOT FIT: weights, 2.0 GiB"), (14640, 0, "limit): weights, 915.1 MiB"),
])  # fmt: skip
def test_what_does_not_fit_is_a_failure_a_close_one_is_not(size, status, said, tmp_path, capsys):
    path = tmp_path / "script.py"
    path.write_text(
        "import torch, poptorch\n"
        f"with torch.device('meta'): model = torch.nn.Linear({size}, 1 << 14)\n"
        f"poptorch.inferenceModel(model).compile(torch.empty(1, {size}, device='meta'))\n"
    )
    assert main(["estimate", str(path)]) == status
    assert said in capsys.readouterr().out


def test_what_cannot_be_run_or_priced_is_one_message(script: str, tmp_path, capsys) -> None:
    (tmp_path / "empty.py").write_text("")
    for words, said in (
        (["--system", "x:2", script, "8"], "There is no such system"),
        ([str(tmp_path / "none.py")], "There is no file"),
        ([str(tmp_path / "empty.py")], "used no wrapped model"),
        (["--processes", "8", script, "8"], "needs the latency of the link"),
        (["--latency", "20us", script, "8"], "add --processes"),
        (["--processes", "8", *LINK, "--all", script, "8"], "leave --all out"),
    ):
        assert main(["estimate", *words]) == 2
        assert said in capsys.readouterr().err


LINK = ["--latency", "1ms", "--bandwidth", "1Gb"]


def test_a_curve_starts_from_calls_that_are_measured(tmp_path, capsys) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import torch, poptorch\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x): return poptorch.identity_loss(super().forward(x), 'mean')\n"
        "options = poptorch.Options().backend('reference')\n"
        "poptorch.trainingModel(Net(8, 4), options)(torch.ones(2, 8))\n"
    )
    assert main(["estimate", "--processes", "2,64", *LINK, str(path)]) == 0
    title, _, two, many = capsys.readouterr().out.splitlines()[-4:]
    said = "ms per call, measured here (the median of 8); 512 B of gradients an update; a link of "
    assert title.endswith(f"{said}1 ms and 1 Gb/s (nothing was run)")
    assert re.search("4.24 ms .*latency +2.12 ms +4.24 ms +twice the accumulation [0-9.]+%", two)
    assert re.match("64 +267 ms +267 ms +[0-9.]+% +latency +12.7 ms +59.4 ms", many)


@pytest.mark.slow
def test_our_options_behind_the_script_are_said_to_be_the_scripts(script, capsys, monkeypatch):
    monkeypatch.delenv("POPTORCH_POD")
    assert main(["estimate", script, "8", "--system=mk2:1"]) == 0
    out, err = capsys.readouterr()
    assert "on mk2:64" in out
    assert "--system=mk2:1 after" in err
    assert main(["estimate", "--all", script, "8"]) == 0
    out, err = capsys.readouterr()
    assert "after" not in err
    assert out.index("Linear, inference, on mk2:64") < out.index("ran on")


def made(directory: Path, cycles: float, size: float) -> str:
    """A profile with what is printed and compared."""
    chip = {"chip": 0, "peak": {"weights": size}, "peak_at": "0F0", "parts": {"compute": cycles}}
    chip |= {"limit": 2 * size, "cycles": cycles}
    culprit = dataclasses.asdict(Culprit(0, "0F0", "weights", "", "", "", size, -50.0))
    priced = {
        "system": "bow:1", "fits": True, "culprit": culprit, "items_per_second": 10.0,
        "verdict": "fits", "kind": "transformer", "seconds": 1.0, "cycles": cycles,
        "share_of_peak": 0.1, "chips": [chip], "operators": [], "clock": 1e9, "replicas": 1,
        "bound": {"compute": 1.0}, "error_band": 1.5, "guesses": [], "advice": [],
    }  # fmt: skip
    content = {"format": FORMAT, "name": "net", "estimated": priced, "measured": None}
    directory.mkdir()
    (directory / "profile.json").write_text(json.dumps(content))
    return str(directory)


def test_reports_are_printed_and_compared(tmp_path, capsys) -> None:
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


def test_reports_of_strangers_are_said_to_be_none_or_printed_as_text(tmp_path, capsys) -> None:
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
    assert "no regular file" in capsys.readouterr().err


CARDS = """\
+---------------+---------------------------------------------------------------------------------+
|  gc-monitor   |        Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs        |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|    IPU-M    |       Serial       |IPU-M SW|Server version|  ICU FW  | Type  | ID | IPU# |Routing|
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|  10.1.5.7   | 0069.0002.8210521  |        |    1.9.0     |  2.4.4   | M2000 | 0  |  3   |  DNC  |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+"""


@pytest.fixture(autouse=True)
def _own_pod(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_POD_DIR", str(tmp_path))
    monkeypatch.setenv("POPTORCH_POD", "4")


def output(tool, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert tool(arguments) == 0
    return capsys.readouterr().out


def test_the_table_is_drawn_as_the_real_one() -> None:
    title = "Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs"
    row = ("10.1.5.7", "0069.0002.8210521", "", "1.9.0", "2.4.4", "M2000", "0", "3", "DNC")
    titles = [("gc-monitor", 15), (title, 81)]
    assert box(titles, gc_tools._CARD_WIDTHS, [gc_tools._CARD_HEAD, row]) == CARDS


def test_monitor_shows_devices_and_processes(capsys) -> None:
    text = output(monitor, capsys)
    assert "Partition: virtual-mk2-4 [active] has 4 reconfigurable IPUs" in text
    assert text.count("| M2000 |") == 4
    serials = [line.split("|")[2].strip() for line in text.splitlines() if "M2000" in line]
    assert serials == 2 * ["0000.0002.0000000"] + 2 * ["0000.0001.0000000"]
    assert "No attached processes in partition virtual-mk2-4" in text
    lease = _pod.acquire(2)
    lines = output(monitor, capsys, "--no-card-info").splitlines()
    assert "Attached processes in partition virtual-mk2-4" in lines[1]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[5:-1]]
    assert [row[0] for row in rows] == [str(os.getpid())] * 2
    assert [row[4] for row in rows] == ["0", "1"]
    assert {row[5] for row in rows} == {"1330MHz"}
    assert {row[1] for row in rows} == {_pod.holders()[0].process.command}
    assert len({len(line) for line in lines}) == 1
    lease.release()


def test_facts_in_json(capsys) -> None:
    lease = _pod.acquire(1)
    facts = json.loads(output(monitor, capsys, "--json"))
    assert (facts["partition"], facts["ipus"], len(facts["cards"])) == ("virtual-mk2-4", 4, 4)
    (process,) = facts["processes"]
    assert (process["pid"], process["device"], process["ipus"]) == (os.getpid(), 0, [0])
    assert "cards" not in json.loads(output(monitor, capsys, "-j", "--no-card-info"))
    lease.release()
    (facts,) = json.loads(output(info, capsys, "-d", "6", "-j"))
    assert (facts["type"], facts["ipu_version"], facts["held_by"]) == ("group", "ipu2", [])


def test_info_lists_devices_or_tells_about_one(capsys) -> None:
    lease = _pod.acquire(2)
    text = output(info, capsys, "--list-devices")
    assert text == output(info, capsys)  # when it is asked for nothing
    lines = text.splitlines()
    assert (len(lines), lines[3]) == (7, "Id 3: single, IPU 3")
    assert lines[4] == f"Id 4: group, IPUs 0, 1, held by process {os.getpid()}"
    lease.release()
    text = output(info, capsys, "--device-id", "6")
    assert "ipus: [0, 1, 2, 3]" in text
    assert "tiles per ipu: 1472" in text
    assert info(["-d", "7"]) == 2
    assert "no device 7" in capsys.readouterr().err


def test_a_machine_without_devices(capsys, monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_POD", "0")
    assert "has 0 reconfigurable IPUs" in output(monitor, capsys)
    assert output(info, capsys, "-l") == "No IPU detected in virtual-mk2-0\n"
    monkeypatch.setenv("POPTORCH_POD", "nonsense")
    for tool, arguments in ((monitor, []), (info, ["-l"])):
        assert tool(arguments) == 2
        assert "POPTORCH_POD describes no system" in capsys.readouterr().err
