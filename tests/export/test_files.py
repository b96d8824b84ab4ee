"""What an exported file says, from Python and from the command line; what cannot be exported."""

import inspect
import subprocess
import sys

import pytest
import torch

import poptorch
from helpers.exported import loaded
from helpers.wrapping import Regression, options
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
    """Return the results of one run; add its gradients up."""
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
    """Change the weights by their gradients."""
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


@pytest.mark.parametrize("place", ["", ":train"])
def test_the_command_writes_what_a_script_would_run(place: str, tmp_path, capsys) -> None:
    script, file = tmp_path / "net.py", tmp_path / "step.py"
    script.write_text(SCRIPT)
    assert main(["export", "-o", str(file), f"{script}{place}"]) == 0
    assert capsys.readouterr().out == f"wrote {file}, and what it works on beside it\n"
    assert FUNCTIONS in file.read_text()
    page = file.with_suffix(".html")
    assert main(["export", f"{script}{place}", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "<title>Net: its step</title>" in page.read_text()
    run = [sys.executable, str(file)]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("loss tensor(0.")
    wrong = {
        "there.py": "There is no file there.py",
        f"{script}:test": f"{script} has no function test",
        __file__: f"{__file__} used no wrapped model",
    }
    for words, said in wrong.items():
        assert main(["export", "-o", "step.py", words]) == 2
        assert capsys.readouterr().err == f"{said}\n"
    for words, said in ((), "-o step.py"), (("--html", "step.htm"), "step.htm, which ends in .htm"):
        assert main(["export", *words, str(script)]) == 2  # before the script runs
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_torch_compiles_an_exported_step(tmp_path, monkeypatch) -> None:
    model, file = Regression(), tmp_path / "step.py"
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.randn(4, 4), torch.randn(4, 2)
    executor.compile(*batch)
    executor.export(file)
    module = loaded(file)
    monkeypatch.setitem(sys.modules, "step", module)  # where torch's compiler looks for it
    (eager, _), (compiled, _) = (module.load(file.with_suffix(".safetensors")) for _ in range(2))
    step = torch.compile(module.step)
    for _ in range(3):
        torch.testing.assert_close(step(*compiled, *batch), module.step(*eager, *batch))
    torch.testing.assert_close(compiled, eager)


class Told(torch.nn.Module):
    def forward(self, x):
        return poptorch.ipu_print_tensor(x) + 1


class Looped(torch.nn.Module):
    def forward(self, x):
        return poptorch.for_loop(3, lambda y: y * 2, [x])[0]


@pytest.mark.parametrize("model, operator", [(Told, "print_tensor"), (Looped, "while_loop")])
def test_what_is_not_torchs_is_refused(model: type, operator: str, tmp_path) -> None:
    executor = poptorch.inferenceModel(model(), options())
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor.export(tmp_path / "step.py")
    executor.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match=operator) as refused:
        executor.export(tmp_path / "step.py")
    assert inspect.getsource(model).splitlines()[-1].strip() in refused.value.message
    assert not list(tmp_path.iterdir())
