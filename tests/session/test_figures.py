"""Counters, latencies, cycles, compile time, names and anchors."""

import copy
import datetime

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Graded, inference, options
from poptorch import OutputMode


def net() -> nn.Module:
    return Graded(both=True, body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(4, 2))


def batch(rows: int):
    return torch.randn(rows, 3), torch.randn(rows, 2)


@pytest.mark.spec("runtime", 19, 20)
def test_compile_time_and_cycles(capsys) -> None:
    quiet = inference(lambda x: x)
    with pytest.raises(poptorch.Error, match="Please compile the model"):
        quiet.compilationTime()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        quiet.cycleCount()
    quiet(torch.ones(2))
    assert capsys.readouterr().err == ""
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        quiet.compilationTime()
    opts = options().showCompilationProgressBar().logCycleCount(True)
    shown = poptorch.inferenceModel(lambda x: x, opts)
    shown.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        shown.cycleCount()
    shown(torch.ones(2))
    assert "Graph compilation: 100%" in capsys.readouterr().err
    assert isinstance(shown.compilationTime(), datetime.timedelta)
    assert shown.cycleCount() > 0


ANCHORS = {
    "x": "input", "loss": "loss", "weight": "head.weight", "grad": "Gradient___head.weight",
    "new": "UpdatedVar___head.weight", "hidden": "body/1/ReLU", "module": "body.0",
}  # fmt: skip


def test_anchored_tensors() -> None:
    model = net()
    eager = copy.deepcopy(model)
    opts = options()
    for short, long in ANCHORS.items():
        opts.anchorTensor(short, long)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AssertionError, match="No tensor with name"):
        training.getAnchoredTensor("x")
    with pytest.raises(AssertionError, match="once the model is compiled"):
        training.getTensorNames()
    x, y = batch(2)
    out, loss = training(x, y)
    eager(x, y)[1].backward()
    weight = eager.head.weight.detach()
    hidden = eager.body(x).detach()
    expected = {
        "x": x, "loss": loss, "weight": weight, "grad": eager.head.weight.grad, "hidden": hidden,
        "new": weight - 0.1 * eager.head.weight.grad, "module": eager.body[0](x).detach(),
    }  # fmt: skip
    assert out.shape == (2, 2)
    for short, value in expected.items():
        torch.testing.assert_close(training.getAnchoredTensor(short), value)
    with pytest.raises(AssertionError, match="No tensor with name other"):
        training.getAnchoredTensor("other")
    names = {"input/1", "head/Linear", "scaledLearningRate0___specific___head.weight"}
    assert {*ANCHORS.values()} - {"body.0"} | names <= {*training.getTensorNames()}
    plain = poptorch.inferenceModel(net(), options().disableModuleNamescope())
    plain(*batch(2))
    assert "Linear" in plain.getTensorNames()
    assert "head/Linear" not in plain.getTensorNames()


def test_anchors_have_output_modes_of_their_own() -> None:
    opts = options(iterations=4, accumulation=2, replicas=2)
    opts.anchorTensor("final", "input")
    opts.anchorTensor("all", "input", output_mode=OutputMode.All)
    opts.anchorTensor("second", "input", output_mode=OutputMode.EveryN, output_return_period=2)
    opts.anchorTensor("sum", "input", output_mode=OutputMode.Sum)
    opts.anchorTensor("new", "UpdatedVar___head.bias", output_mode=OutputMode.All)
    model = net()
    training = poptorch.trainingModel(model, opts)
    x, y = batch(16)
    training(x, y)
    assert torch.equal(training.getAnchoredTensor("all"), x)
    assert torch.equal(training.getAnchoredTensor("final"), x[-2:])
    assert torch.equal(training.getAnchoredTensor("second"), torch.cat([x[4:8], x[12:16]]))
    sums = torch.stack([x[0::2].sum(0), x[1::2].sum(0)])
    torch.testing.assert_close(training.getAnchoredTensor("sum"), sums)
    new = training.getAnchoredTensor("new")
    assert new.shape == (8,)  # one per update
    assert torch.equal(new[-2:], model.head.bias.detach())


def test_the_norm_of_the_gradients_is_that_before_clipping() -> None:
    model = net()
    eager = copy.deepcopy(model)
    opts = options(accumulation=4)
    opts.anchorTensor("norm", "GradientNorm")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.01)
    training = poptorch.trainingModel(model, opts, optimizer)
    native = torch.optim.SGD(eager.parameters(), lr=0.1)
    x, y = batch(8)
    for _ in range(2):
        training(x, y)
        native.zero_grad()
        eager(x, y)[1].backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.01)
        native.step()
        torch.testing.assert_close(training.getAnchoredTensor("norm"), norm)
    assert training.plan().program.lanes is not None  # it costs no lanes
    for name in ("GradientNorm", "Gradient___heads.weight"):  # without clipping there is no norm
        opts = options()
        opts.anchorTensor("anchor", name)
        with pytest.raises(poptorch.Error, match=rf"(?s)No tensor with name.*{name[:14]}"):
            poptorch.trainingModel(net(), opts)(*batch(2))
