"""``gc-monitor`` and ``gc-info``."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from poptorch import _pod
from poptorch._cli import gc_tools
from poptorch._cli.gc_tools import box, info, monitor

pytestmark = pytest.mark.usefixtures("own_pod")

Printed = pytest.CaptureFixture[str]
Tool = Callable[[Sequence[str]], int]

CARDS = """\
+---------------+---------------------------------------------------------------------------------+
|  gc-monitor   |        Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs        |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|    IPU-M    |       Serial       |IPU-M SW|Server version|  ICU FW  | Type  | ID | IPU# |Routing|
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+
|  10.1.5.7   | 0069.0002.8210521  |        |    1.9.0     |  2.4.4   | M2000 | 0  |  3   |  DNC  |
+-------------+--------------------+--------+--------------+----------+-------+----+------+-------+"""


def output(tool: Tool, capsys: Printed, *arguments: str) -> str:
    """Run a tool that succeeds; return what it prints."""
    assert tool(arguments) == 0
    return capsys.readouterr().out


@pytest.fixture
def two_held(own_pod: Path) -> Iterator[None]:
    """Let this process hold two of the four IPUs."""
    lease = _pod.acquire(2)
    yield
    lease.release()


def test_the_table_is_drawn_as_the_real_one() -> None:
    title = "Partition: pt-trainee01-4-ipus [active] has 4 reconfigurable IPUs"
    row = ("10.1.5.7", "0069.0002.8210521", "", "1.9.0", "2.4.4", "M2000", "0", "3", "DNC")
    titles = [("gc-monitor", 15), (title, 81)]

    assert box(titles, gc_tools._CARD_WIDTHS, [gc_tools._CARD_HEAD, row]) == CARDS


# gc-monitor.


def test_monitor_shows_devices(capsys: Printed) -> None:
    text = output(monitor, capsys)

    assert "Partition: virtual-mk2-4 [active] has 4 reconfigurable IPUs" in text
    assert text.count("| M2000 |") == 4
    serials = [line.split("|")[2].strip() for line in text.splitlines() if "M2000" in line]
    assert serials == 2 * ["0000.0002.0000000"] + 2 * ["0000.0001.0000000"]


def test_monitor_says_that_no_process_is_attached(capsys: Printed) -> None:
    assert "No attached processes in partition virtual-mk2-4" in output(monitor, capsys)


@pytest.mark.usefixtures("two_held")
def test_monitor_shows_a_row_for_each_ipu_that_a_process_holds(capsys: Printed) -> None:
    lines = output(monitor, capsys, "--no-card-info").splitlines()

    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[5:-1]]
    command = _pod.holders()[0].process.command
    assert "Attached processes in partition virtual-mk2-4" in lines[1]
    assert [row[0] for row in rows] == [str(os.getpid())] * 2
    assert [row[1] for row in rows] == [command] * 2
    assert [row[4] for row in rows] == ["0", "1"]
    assert [row[5] for row in rows] == ["1330MHz"] * 2


@pytest.mark.usefixtures("two_held")
def test_lines_of_the_table_of_processes_have_one_length(capsys: Printed) -> None:
    lines = output(monitor, capsys, "--no-card-info").splitlines()

    assert len({len(line) for line in lines}) == 1


def test_names_of_processes_say_nothing_to_a_terminal(own_pod: Path, capsys: Printed) -> None:
    lease = _pod.acquire(1)
    (file,) = own_pod.glob("*.json")
    entry = json.loads(file.read_text())
    entry["process"] |= {"command": "\x1b[2Jpython\n", "user": "a\tb"}
    file.write_text(json.dumps(entry))

    printed = output(monitor, capsys)

    assert "\\x1b[2Jpython\\n" in printed
    assert "a\\tb" in printed
    lease.release()


def test_monitor_in_json_has_the_devices(capsys: Printed) -> None:
    facts = json.loads(output(monitor, capsys, "--json"))

    assert facts["partition"] == "virtual-mk2-4"
    assert facts["ipus"] == 4
    assert len(facts["cards"]) == 4


def test_monitor_in_json_has_the_processes(capsys: Printed) -> None:
    lease = _pod.acquire(1)

    (process,) = json.loads(output(monitor, capsys, "--json"))["processes"]

    assert process["pid"] == os.getpid()
    assert process["device"] == 0
    assert process["ipus"] == [0]
    lease.release()


def test_monitor_in_json_has_no_devices_if_asked_to_leave_them_out(capsys: Printed) -> None:
    assert "cards" not in json.loads(output(monitor, capsys, "-j", "--no-card-info"))


# gc-info.


def test_info_lists_devices_also_when_it_is_asked_for_nothing(capsys: Printed) -> None:
    listed = output(info, capsys, "--list-devices")

    assert output(info, capsys) == listed


@pytest.mark.usefixtures("two_held")
def test_info_lists_single_ipus_and_groups_and_their_holders(capsys: Printed) -> None:
    lines = output(info, capsys, "--list-devices").splitlines()

    assert len(lines) == 7
    assert lines[3] == "Id 3: single, IPU 3"
    assert lines[4] == f"Id 4: group, IPUs 0, 1, held by process {os.getpid()}"


def test_gc_info_describes_one_device(capsys: Printed) -> None:
    text = output(info, capsys, "--device-id", "6")

    assert "ipus: [0, 1, 2, 3]" in text
    assert "tiles per ipu: 1472" in text


def test_info_about_a_missing_device_is_refused(capsys: Printed) -> None:
    status = info(["-d", "7"])

    assert status == 2
    assert "no device 7" in capsys.readouterr().err


def test_info_in_json_has_the_facts_of_a_device(capsys: Printed) -> None:
    (facts,) = json.loads(output(info, capsys, "-d", "6", "-j"))

    assert facts["type"] == "group"
    assert facts["ipu_version"] == "ipu2"
    assert facts["held_by"] == []


# Other machines.


def test_a_machine_without_devices_is_shown(
    capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_POD", "0")

    assert "has 0 reconfigurable IPUs" in output(monitor, capsys)
    assert output(info, capsys, "-l") == "No IPU detected in virtual-mk2-0\n"


@pytest.mark.parametrize("tool, arguments", [(monitor, []), (info, ["-l"])])
def test_a_system_that_cannot_be_read_is_refused(
    tool: Tool, arguments: list[str], capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPTORCH_POD", "nonsense")

    status = tool(arguments)

    assert status == 2
    assert "POPTORCH_POD does not describe a system" in capsys.readouterr().err
