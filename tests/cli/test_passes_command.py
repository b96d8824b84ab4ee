"""``poptorch passes`` lists the passes of a compilation, and shows what each one changes."""

from collections.abc import Callable
from pathlib import Path

import pytest

from poptorch._cli.main import main
from poptorch._compile.passes import PASSES

SCRIPT = """
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 8)

    def forward(self, x):
        return poptorch.identity_loss(self.fc(x).square(), "mean")

def train():
    model = Net()
    options = poptorch.Options().showCompilationProgressBar(False).backend("reference")
    options.Training.gradientAccumulation(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    training = poptorch.trainingModel(model, options, optimizer)
    training(torch.ones(4, 4))
    print("ran on")

if __name__ == "__main__":
    train()
"""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Return a function that runs the command and returns the lines of its output."""

    def lines(*arguments: str, status: int = 0) -> list[str]:
        assert main(["passes", *arguments]) == status
        captured = capsys.readouterr()
        return (captured.err if status else captured.out).splitlines()

    return lines


@pytest.fixture
def net(script: Callable[[str], str]) -> str:
    return script(SCRIPT)


def test_the_list_has_columns(run: Callable[..., list[str]]) -> None:
    first = run()[0]

    assert first.split("  ")[-1].strip() == "what it does"
    assert [each for each in ("pass", "package", "needs", "makes") if each not in first] == []


def test_the_list_numbers_the_passes_in_their_order(run: Callable[..., list[str]]) -> None:
    lines = run()[1:]

    for number, (line, each) in enumerate(zip(lines, PASSES, strict=True), 1):
        assert line.startswith(f"{number}")
        assert f"  {each.name}" in line
        assert each.does in line


def test_the_list_names_the_passes_that_can_be_left_out(run: Callable[..., list[str]]) -> None:
    (capture,) = (line for line in run() if line.split()[1:2] == ["capture"])

    assert "repeated calls, lone writes, whole writes" in capture


def test_a_script_prints_how_many_lines_each_pass_changes(
    net: str, run: Callable[..., list[str]]
) -> None:
    lines = run(net)

    assert [line.partition(":")[0] for line in lines] == [each.name for each in PASSES]


def test_passes_that_only_check_change_nothing(net: str, run: Callable[..., list[str]]) -> None:
    assert "check overlap: changes nothing" in run(net)


def test_a_pass_counts_the_lines_that_it_adds_and_removes(
    net: str, run: Callable[..., list[str]]
) -> None:
    (line,) = (line for line in run(net) if line.startswith("capture: "))

    assert line.startswith("capture: adds ")
    assert line.endswith(" lines, removes 0")


def test_the_script_ends_before_its_call(net: str, run: Callable[..., list[str]]) -> None:
    assert "ran on" not in run(net)


def test_a_difference_shows_the_lines(net: str, run: Callable[..., list[str]]) -> None:
    lines = run("--diff", net)

    assert "-  in  batch.0: float32[2, 4]" in lines
    assert "+  in  batch.0: float32[2, 2, 4]" in lines


def test_a_difference_shows_the_stage_of_each_operator(
    net: str, run: Callable[..., list[str]]
) -> None:
    lines = run("--diff", net)

    assert [line for line in lines if line[:1] == "+" and line.endswith("# 0B")]


def test_a_function_of_a_file_is_called(net: str, run: Callable[..., list[str]]) -> None:
    assert run(f"{net}:train") == run(net)


def test_options_may_follow_the_script(net: str, run: Callable[..., list[str]]) -> None:
    assert run(net, "--diff") == run("--diff", net)


def test_if_lanes_are_left_out_their_pass_changes_nothing(
    net: str, run: Callable[..., list[str]]
) -> None:
    assert "lanes: changes nothing" in run("--without", "lanes", net)


def test_a_pass_that_cannot_be_left_out_is_refused(net: str, run: Callable[..., list[str]]) -> None:
    lines = run("--without", "place", net, status=2)

    assert lines[0] == "This pass cannot be left out"


def test_a_file_that_does_not_exist_is_named(tmp_path: Path, run: Callable[..., list[str]]) -> None:
    assert run(str(tmp_path / "no.py"), status=2) == [f"There is no file {tmp_path / 'no.py'}"]


def test_a_script_without_a_model_is_refused(
    script: Callable[[str], str], run: Callable[..., list[str]]
) -> None:
    (line,) = run(script("x = 1"), status=2)

    assert line.endswith("used no wrapped model")


def test_options_without_a_script_are_refused(run: Callable[..., list[str]]) -> None:
    (line,) = run("--diff", status=2)

    assert "a script" in line
