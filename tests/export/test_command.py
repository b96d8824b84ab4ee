"""``poptorch export`` writes the step of a script."""

from pathlib import Path

import pytest

from helpers import programs
from poptorch._cli.main import main

SCRIPT = """
import torch, poptorch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, labels):
        out = self.fc2(torch.relu(self.fc1(x)))
        return out, nn.functional.cross_entropy(out, labels)

def train():
    torch.manual_seed(0)
    model = Net()
    options = poptorch.Options().showCompilationProgressBar(False).backend("reference")
    options.Training.gradientAccumulation(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    training = poptorch.trainingModel(model, options.lanes(1), optimizer)
    training(torch.ones(8, 4), torch.tensor([0, 1] * 4))
    print("ran on")

if __name__ == "__main__":
    train()
"""
FUNCTIONS = '''\
def forward_backward(p, acc, x, labels):
    """Return the results of one run; accumulate its gradients."""
    g = {}  # gradients
    relu = torch.relu(F.linear(x, p["fc1.weight"], p["fc1.bias"]))  # net.py:11
    output = F.linear(relu, p["fc2.weight"], p["fc2.bias"])
    log_softmax = torch.log_softmax(output, 1)  # net.py:12
    loss, nll_loss_weight = aten.nll_loss_forward(log_softmax, labels, None, 1, -100)

    # Backward.
    d_nll_loss = aten.nll_loss_backward(
        torch.ones_like(loss), log_softmax, labels, None, 1, -100, nll_loss_weight
    )
    d_log_softmax = aten._log_softmax_backward_data(d_nll_loss, log_softmax, 1, torch.float32)
    g["fc2.weight"] = d_log_softmax.t() @ relu  # net.py:11
    g["fc2.bias"] = torch.sum(d_log_softmax, [0], True).reshape(2)
    d_threshold = aten.threshold_backward(d_log_softmax @ p["fc2.weight"], relu, 0)
    g["fc1.weight"] = d_threshold.t() @ x
    g["fc1.bias"] = torch.sum(d_threshold, [0], True).reshape(8)
    for name in WEIGHTS:
        acc[name] += g[name]
    return output, loss


def update(p, acc, h):
    """Update the weights with their gradients."""
    negative = -h["lr"]
    for name in WEIGHTS:
        scaled = acc[name] * 0.5
        acc[name].zero_()
        p[name].copy_(torch.addcmul(p[name], scaled, negative))


@torch.no_grad()
def step(p, acc, h, x, labels):
    """Make one call."""
    x = x.unflatten(0, (2, -1))
    labels = labels.unflatten(0, (2, -1))
    for a in range(2):
        output, loss = forward_backward(p, acc, x[a], labels[a])
    update(p, acc, h)
    return output, loss
'''

Printed = pytest.CaptureFixture[str]
of_script_or_function = pytest.mark.parametrize("function", ["", ":train"])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Return a script that trains for one call."""
    script = tmp_path / "net.py"
    script.write_text(SCRIPT)
    return script


@of_script_or_function
def test_the_command_writes_the_step_and_prints_its_path(
    function: str, script: Path, tmp_path: Path, capsys: Printed
) -> None:
    """The script ends with its first call, so that it prints nothing afterwards."""
    file = tmp_path / "step.py"

    status = main(["export", "-o", str(file), f"{script}{function}"])

    assert status == 0
    assert capsys.readouterr().out == f"wrote {file}, and its weights and settings next to it\n"
    assert FUNCTIONS in file.read_text()


@of_script_or_function
def test_the_command_writes_a_page_and_prints_its_path(
    function: str, script: Path, tmp_path: Path, capsys: Printed
) -> None:
    page = tmp_path / "step.html"

    status = main(["export", f"{script}{function}", "--html", str(page)])

    assert status == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "<title>Net: its step</title>" in page.read_text()


@pytest.mark.slow
@of_script_or_function
def test_the_written_step_runs(function: str, script: Path, tmp_path: Path) -> None:
    file = tmp_path / "step.py"
    main(["export", "-o", str(file), f"{script}{function}"])

    done = programs.run(file)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("loss tensor(0.")


@pytest.mark.parametrize(
    "program, message",
    [
        pytest.param("there.py", "There is no file there.py", id="no file"),
        pytest.param("{script}:test", "{script} has no function test", id="no function"),
        pytest.param(__file__, f"{__file__} used no wrapped model", id="no model"),
    ],
)
def test_a_program_without_a_step_is_refused(
    program: str, message: str, script: Path, capsys: Printed
) -> None:
    status = main(["export", "-o", "step.py", program.format(script=script)])

    assert status == 2
    assert capsys.readouterr().err == f"{message.format(script=script)}\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        pytest.param([], "-o step.py", id="no file to write"),
        pytest.param(
            ["--html", "step.htm"], "step.htm: its suffix is '.htm'", id="a page of another suffix"
        ),
    ],
)
def test_a_call_that_names_no_file_to_write_is_refused_before_the_script_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: Printed
) -> None:
    script = tmp_path / "told.py"
    script.write_text("print('the script runs')")

    status = main(["export", *arguments, str(script)])

    printed = capsys.readouterr()
    assert status == 2
    assert message in printed.err
    assert printed.out == ""
