"""What a call returns: shapes by output mode, structures, dtypes, storage, no history."""

import copy

import pytest
import torch
from torch import nn

import poptorch
from helpers.beside import ROWS, Eager, Ours, Way
from helpers.wrapping import Calling, Graded, Having, inference, options, saved


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
