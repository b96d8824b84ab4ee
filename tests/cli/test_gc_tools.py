"""``gc-monitor`` and ``gc-info``: the tables that users know, and JSON."""

import json
import os

import pytest

from poptorch import _pod
from poptorch._cli import gc_tools
from poptorch._cli.gc_tools import box, info, monitor

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
