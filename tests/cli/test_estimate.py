"""``poptorch estimate``: the price of the first model of a script."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from poptorch._cli.main import main

pytestmark = pytest.mark.usefixtures("own_pod")

Script = Callable[[str], str]
Printed = pytest.CaptureFixture[str]

SCRIPT = """
model = torch.nn.Linear(int(sys.argv[1]), 4)
poptorch.inferenceModel(model)(torch.ones(2, int(sys.argv[1])))
print("ran on")
"""


@pytest.fixture
def linear(script: Script) -> str:
    return script(SCRIPT)


def test_the_first_model_is_priced_and_the_script_ends(linear: str, capsys: Printed) -> None:
    arguments = list(sys.argv)

    status = main(["estimate", "--system", "mk2:1", linear, "8"])

    shown = capsys.readouterr().out
    assert status == 0
    assert shown.startswith("script.py: Linear, inference, on mk2:1: 1 replica of 1 IPU,")
    assert "aten.addmm" in shown
    assert "ran on" not in shown
    assert sys.argv == arguments


def test_an_estimate_can_be_written_to_a_file(linear: str, tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"

    main(["estimate", "--system", "mk2:1", "--json", str(file), linear, "8"])

    written = json.loads(file.read_text())
    assert written["estimated"]["system"] == "mk2:1"
    assert written["name"] == "script.py: Linear, inference"


def test_a_written_estimate_is_shown_again_by_report(
    linear: str, tmp_path: Path, capsys: Printed
) -> None:
    file = str(tmp_path / "estimate.json")
    main(["estimate", "--system", "mk2:1", "--json", file, linear, "8"])
    shown = capsys.readouterr().out

    status = main(["report", file])

    assert status == 0
    assert capsys.readouterr().out == shown


@pytest.mark.parametrize(
    "size, status, verdict, largest",
    [
        (1 << 15, 1, "DOES NOT FIT: chip 0 needs ", "the largest part is weights, 2.0 GiB"),
        (14640, 0, "limit): chip 0 needs ", "the largest part is weights, 915.1 MiB"),
    ],
)
def test_a_model_that_does_not_fit_is_a_failure_and_a_close_one_is_not(
    size: int,
    status: int,
    verdict: str,
    largest: str,
    script: Script,
    capsys: Printed,
) -> None:
    file = script(
        f"with torch.device('meta'): model = torch.nn.Linear({size}, 1 << 14)\n"
        f"poptorch.inferenceModel(model).compile(torch.empty(1, {size}, device='meta'))\n"
    )
    assert main(["estimate", file]) == status
    printed = capsys.readouterr().out
    assert verdict in printed
    assert largest in printed


LINK = ["--latency", "1ms", "--bandwidth", "1Gb"]


@pytest.mark.parametrize(
    "words, expected",
    [
        (["--system", "x:2", "LINEAR", "8"], "There is no such system"),
        (["FOLDER/none.py"], "There is no file"),
        (["FOLDER/empty.py"], "used no wrapped model"),
        (["--processes", "8", "LINEAR", "8"], "needs the latency of the link"),
        (["--latency", "20us", "LINEAR", "8"], "need --processes"),
        (["--processes", "8", *LINK, "--all", "LINEAR", "8"], "cannot be combined with --all"),
    ],
)
def test_a_script_that_cannot_be_run_or_priced_causes_one_message(
    words: list[str], expected: str, linear: str, tmp_path: Path, capsys: Printed
) -> None:
    (tmp_path / "empty.py").write_text("")
    places = {"LINEAR": linear, "FOLDER": str(tmp_path)}
    words = [re.sub("LINEAR|FOLDER", lambda found: places[found[0]], word) for word in words]

    status = main(["estimate", *words])

    assert status == 2
    assert expected in capsys.readouterr().err


def test_a_curve_starts_from_calls_that_are_measured(script: Script, capsys: Printed) -> None:
    file = script(
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x): return poptorch.identity_loss(super().forward(x), 'mean')\n"
        "options = poptorch.Options().backend('reference')\n"
        "poptorch.trainingModel(Net(8, 4), options)(torch.ones(2, 8))\n"
    )
    assert main(["estimate", "--processes", "2,64", *LINK, file]) == 0
    title, _, two, many = capsys.readouterr().out.splitlines()[-4:]
    expected = "measured here (the median of 8); 512 B of gradients per update; a link with "
    assert title.endswith(f"{expected}1 ms and 1 Gb/s (nothing was run)")
    assert re.search("4.24 ms .*latency +2.12 ms +4.24 ms +twice the accumulation [0-9.]+%", two)
    # The first time includes the measured call, which may take a millisecond on a busy machine.
    assert re.match("64 +[0-9]+ ms +267 ms +[0-9.]+% +latency +12.7 ms +59.4 ms", many)


@pytest.mark.slow
def test_options_after_the_script_belong_to_the_script_and_a_message_says_so(
    linear: str, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPTORCH_POD")

    status = main(["estimate", linear, "8", "--system=mk2:1"])

    out, err = capsys.readouterr()
    assert status == 0
    assert "on mk2:64" in out
    assert "--system=mk2:1 comes after" in err


@pytest.mark.slow
def test_with_all_models_the_script_continues_after_an_estimate(
    linear: str, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPTORCH_POD")

    status = main(["estimate", "--all", linear, "8"])

    out, err = capsys.readouterr()
    assert status == 0
    assert "comes after" not in err
    assert out.index("Linear, inference, on mk2:64") < out.index("ran on")
