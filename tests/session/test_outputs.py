"""What calls return; counters, latencies, cycles, compile time, names and anchors."""

import copy
import datetime

import pytest
import torch
from torch import nn

import poptorch
from helpers.beside import ROWS, Eager, Ours, Way
from helpers.wrapping import Calling, Graded, Having, inference, options, saved
from poptorch import OutputMode


def with_loss() -> nn.Module:
    torch.manual_seed(1)
    return Graded(both=True, layer=nn.Linear(3, 2))


SHAPES = [
    # iterations, accumulation, replicas, mode, period, how many predictions come back, loss
    (1, 1, 1, "Default", 1, 1, ()),
    (2, 2, 2, "All", 1, 8, (8,)),
    (2, 1, 4, "Final", 1, 4, (4,)),
    (4, 2, 2, "EveryN", 2, 8, (8,)),
    (2, 2, 2, "Sum", 1, 2, (2,)),
]


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
@pytest.mark.spec("programs", 13, 14, 26)
@pytest.mark.parametrize(("d", "g", "r", "mode", "period", "count", "loss"), SHAPES)
def test_shapes_contents_and_counters_of_outputs(d, g, r, mode, period, count, loss) -> None:
    way = Way(iterations=d, accumulation=g, replicas=r, mode=mode, period=period)
    eager = Eager(with_loss, lambda results: results[1], way)
    training = Ours(with_loss, way).wrapper
    x, y = torch.randn(way.rows, 3), torch.randn(way.rows, 2)
    empty = training.getPerfCounters()
    assert empty == {k: [[]] for k in ("input", "input_complete", "output", "output_complete")}
    assert training.getLatency() == (0.0, 0.0, 0.0)
    out, got = training(x, y)
    assert (out.shape, got.shape) == ((count * ROWS, 2), loss)
    torch.testing.assert_close((out, got), eager(x, y))
    counters = training.getPerfCounters()
    for key, stamps in (("input", d * g * r), ("output", count)):
        for name in (key, f"{key}_complete"):
            assert [len(each) for each in counters[name]] == [stamps] * 2
    of_parts = training.getHostIpuLatency, training.getComputeLatency, training.getIpuHostLatency
    parts = [latency() for latency in of_parts]
    assert all(0 <= part[0] <= part[2] <= part[1] for part in parts)
    assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(training.getLatency())


@pytest.mark.spec("executor", 14, 48, 65)
def test_all_outputs_of_inference_line_up_with_the_inputs() -> None:
    x = torch.arange(24.0).reshape(12, 2)
    assert torch.equal(inference(lambda x: x * 2, iterations=3, replicas=2)(x), x * 2)
    assert torch.equal(inference(lambda x: x.sum().reshape(1), iterations=12)(x[:, 0]), x[:, 0])

    def losses(x, y):  # two are fine
        return nn.functional.mse_loss(x, y), nn.functional.l1_loss(x, y)

    torch.testing.assert_close(inference(losses)(x, x + 2), losses(x, x + 2))


@pytest.mark.spec("executor", 49)
def test_results_have_no_history_and_say_so() -> None:
    out, loss = poptorch.trainingModel(with_loss(), options())(torch.randn(2, 3), torch.randn(2, 2))
    for result in (out, loss):
        assert type(result) is torch.Tensor
        assert not result.requires_grad
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            result.backward()
    for again in (saved(out), copy.deepcopy(out)):
        assert torch.equal(again, out)
    leaf = (out * 2).requires_grad_()
    leaf.sum().backward()  # what is computed from it on the host is ordinary
    assert leaf.grad is not None


def test_results_never_share_storage() -> None:
    def forward(module, x):
        y = x + 1
        return y, y, y.view(-1, 2)[:1], x, x[:1], module.weight, module.weight.t()

    x = torch.randn(2, 2)
    wrapped = inference(Having(forward, weight=nn.Parameter(torch.ones(2, 2))))
    got = wrapped(x)
    expected = [t.clone() for t in got]
    for result in got:
        result.fill_(9)
        assert all((t == 9).all() or torch.equal(t, e) for t, e in zip(got, expected, strict=True))
    assert len({t.data_ptr() for t in got}) == len(got)
    assert not (x == 9).any()
    assert torch.equal(wrapped(x)[5], torch.ones(2, 2))
    assert all((t == 9).all() for t in got)  # results of earlier calls stay


def test_tensors_of_the_host_come_back_as_they_are() -> None:
    module = Calling(lambda x: (x, module.note, x + 1))
    module.note = torch.arange(3)
    wrapped = inference(module, iterations=2)
    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        _, note, last = wrapped(torch.zeros(4, 1))
    assert torch.equal(note, torch.arange(3))  # neither batched nor narrowed
    assert (note.dtype, last.shape) == (torch.int64, (4, 1))


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_beyond_32_bits_is_an_error(value: int) -> None:
    number = torch.tensor([value])
    wrapped = inference(lambda x: {"half": x / 2, "same": x})
    with pytest.raises(poptorch.Error, match=rf"(?s)into the 32 bits.*same.*{value} to {value}"):
        wrapped(number)
    border = number.clamp(-(2**31), 2**31 - 1)
    result = wrapped(border)["same"]
    assert (result.dtype, result.tolist()) == (torch.int32, border.tolist())
    opts = options()
    opts.Precision.narrow64Bit(False)
    wide = poptorch.inferenceModel(lambda x: x + 1, opts)(number)
    assert (wide.dtype, wide.item()) == (torch.int64, value + 1)


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
    close = "(?s)No tensor.*did you mean Gradient___head.weight or "
    for name, said in {"GradientNorm": "No tensor.*Norm", "Gradient___heads.weight": close}.items():
        opts = options()
        opts.anchorTensor("anchor", name)
        with pytest.raises(poptorch.Error, match=said):  # without clipping there is no norm
            poptorch.trainingModel(net(), opts)(*batch(2))
