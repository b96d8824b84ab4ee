"""What calls return: shapes and contents by output mode, histories, memory and types."""

import copy
import datetime
from typing import NamedTuple

import pytest
import torch
from torch import nn

import poptorch
from helpers.eager_loop import ROWS, Eager, Ours, Setup
from helpers.wrapping import (
    Calling,
    Graded,
    Having,
    inference,
    options,
    saved,
)
from poptorch import OutputMode


def with_loss() -> nn.Module:
    """Return a model of a layer and its mean squared error, always with the same weights."""
    torch.manual_seed(1)
    return Graded(both=True, layer=nn.Linear(3, 2))


class Case(NamedTuple):
    """Counts of a call, its output mode, and what comes back."""

    iterations: int
    accumulation: int
    replicas: int
    mode: str
    period: int
    predictions: int
    """Micro-batches of predictions that come back."""
    loss_shape: tuple[int, ...]

    @property
    def setup(self) -> Setup:
        return Setup(
            iterations=self.iterations,
            accumulation=self.accumulation,
            replicas=self.replicas,
            mode=self.mode,
            period=self.period,
        )


CASES = [
    Case(1, 1, 1, "Default", 1, 1, ()),
    Case(2, 2, 2, "All", 1, 8, (8,)),
    Case(2, 1, 4, "Final", 1, 4, (4,)),
    Case(4, 2, 2, "EveryN", 2, 8, (8,)),
    Case(2, 2, 2, "Sum", 1, 2, (2,)),
]
each_mode = pytest.mark.parametrize("case", CASES, ids=lambda case: case.mode)


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
@pytest.mark.spec("programs", 13, 14, 26)
@each_mode
def test_results_have_the_shape_and_the_contents_of_their_output_mode(case: Case) -> None:
    eager = Eager(with_loss, lambda results: results[1], case.setup)
    training = Ours(with_loss, case.setup).wrapper
    x, y = torch.randn(case.setup.rows, 3), torch.randn(case.setup.rows, 2)

    out, loss = training(x, y)

    assert out.shape == (case.predictions * ROWS, 2)
    assert loss.shape == case.loss_shape
    torch.testing.assert_close((out, loss), eager(x, y))


def called(case: Case) -> poptorch.PoplarExecutor:
    """Return a trained model after one call."""
    training = Ours(with_loss, case.setup).wrapper
    training(torch.randn(case.setup.rows, 3), torch.randn(case.setup.rows, 2))
    return training


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
@each_mode
def test_counters_have_a_stamp_for_each_micro_batch_that_goes_in_or_comes_out(case: Case) -> None:
    """There are two inputs and two outputs."""
    counters = called(case).getPerfCounters()

    inputs = case.iterations * case.accumulation * case.replicas
    stamps = {name: [len(each) for each in of_tensors] for name, of_tensors in counters.items()}
    assert stamps == {
        "input": [inputs] * 2,
        "input_complete": [inputs] * 2,
        "output": [case.predictions] * 2,
        "output_complete": [case.predictions] * 2,
    }


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
@each_mode
def test_latencies_of_the_parts_of_a_call_add_up_to_its_latency(case: Case) -> None:
    training = called(case)

    parts = [
        training.getHostIpuLatency(),
        training.getComputeLatency(),
        training.getIpuHostLatency(),
    ]

    for least, most, mean in parts:
        assert 0 <= least <= mean <= most
    assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(training.getLatency())


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
def test_before_the_first_call_counters_are_empty_and_latencies_zero() -> None:
    training = Ours(with_loss, Setup()).wrapper

    empty = training.getPerfCounters()

    assert empty == {
        "input": [[]],
        "input_complete": [[]],
        "output": [[]],
        "output_complete": [[]],
    }
    assert training.getLatency() == (0.0, 0.0, 0.0)


def test_sums_of_one_micro_batch_are_as_wide_as_of_several() -> None:
    executor = poptorch.inferenceModel(
        Calling(lambda x: x > 0), options().outputMode(OutputMode.Sum)
    )

    for _ in range(3):
        assert executor(torch.tensor([1.0, -1.0])).dtype is torch.int32


@pytest.mark.spec("executor", 14, 48, 65)
def test_all_outputs_of_inference_line_up_with_the_inputs() -> None:
    x = torch.arange(24.0).reshape(12, 2)

    doubled = inference(lambda x: x * 2, iterations=3, replicas=2)(x)

    assert torch.equal(doubled, x * 2)


@pytest.mark.spec("executor", 14, 48, 65)
def test_sums_of_each_row_line_up_with_the_rows() -> None:
    x = torch.arange(12.0)

    assert torch.equal(inference(lambda x: x.sum().reshape(1), iterations=12)(x), x)


@pytest.mark.spec("executor", 14, 48, 65)
def test_inference_may_return_several_losses() -> None:
    def losses(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return nn.functional.mse_loss(x, y), nn.functional.l1_loss(x, y)

    x = torch.arange(24.0).reshape(12, 2)

    torch.testing.assert_close(inference(losses)(x, x + 2), losses(x, x + 2))


@pytest.mark.spec("executor", 49)
@pytest.mark.parametrize("at", [0, 1], ids=["output", "loss"])
def test_results_have_no_history_and_say_so(at: int) -> None:
    training = poptorch.trainingModel(with_loss(), options())

    result = training(torch.randn(2, 3), torch.randn(2, 2))[at]

    assert type(result) is torch.Tensor
    assert not result.requires_grad
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        result.backward()


@pytest.mark.spec("executor", 49)
def test_results_can_be_saved_and_copied() -> None:
    out, _ = poptorch.trainingModel(with_loss(), options())(torch.randn(2, 3), torch.randn(2, 2))

    assert torch.equal(saved(out), out)
    assert torch.equal(copy.deepcopy(out), out)


@pytest.mark.spec("executor", 49)
def test_host_computations_with_results_have_gradients() -> None:
    out, _ = poptorch.trainingModel(with_loss(), options())(torch.randn(2, 3), torch.randn(2, 2))

    leaf = (out * 2).requires_grad_()
    leaf.sum().backward()

    assert leaf.grad is not None


def results_in_one_memory(module: Having, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return tensors that share memory with one another, with the input or with a weight."""
    y = x + 1
    return y, y, y.view(-1, 2)[:1], x, x[:1], module.weight, module.weight.t()


def test_results_never_share_memory() -> None:
    x = torch.randn(2, 2)
    wrapped = inference(Having(results_in_one_memory, weight=nn.Parameter(torch.ones(2, 2))))

    got = wrapped(x)

    expected = [t.clone() for t in got]
    assert len({t.data_ptr() for t in got}) == len(got)
    for at, result in enumerate(got):
        result.fill_(9)
        for later in range(at + 1, len(got)):
            assert torch.equal(got[later], expected[later])


def test_writing_to_results_changes_no_input_no_weight_and_no_later_result() -> None:
    x = torch.randn(2, 2)
    wrapped = inference(Having(results_in_one_memory, weight=nn.Parameter(torch.ones(2, 2))))
    got = wrapped(x)

    for result in got:
        result.fill_(9)

    assert not (x == 9).any()
    assert torch.equal(wrapped(x)[5], torch.ones(2, 2))


def test_results_of_earlier_calls_stay() -> None:
    x = torch.randn(2, 2)
    wrapped = inference(Having(results_in_one_memory, weight=nn.Parameter(torch.ones(2, 2))))
    got = wrapped(x)
    before = [result.clone() for result in got]

    wrapped(x + 1)

    for result, expected in zip(got, before, strict=True):
        assert torch.equal(result, expected)


def test_tensors_of_the_host_come_back_as_they_are() -> None:
    """They are neither batched nor narrowed."""
    module = Calling(lambda x: (x, module.note, x + 1))
    module.note = torch.arange(3)
    wrapped = inference(module, iterations=2)

    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        _, note, last = wrapped(torch.zeros(4, 1))

    assert torch.equal(note, torch.arange(3))
    assert note.dtype == torch.int64
    assert last.shape == (4, 1)


each_beyond_32_bits = pytest.mark.parametrize("value", [2**31, -(2**31) - 1])


@each_beyond_32_bits
def test_an_integer_beyond_32_bits_is_refused(value: int) -> None:
    wrapped = inference(lambda x: {"half": x / 2, "same": x})

    with pytest.raises(poptorch.Error, match=rf"(?s)into 32 bits.*same.*{value} to {value}"):
        wrapped(torch.tensor([value]))


@each_beyond_32_bits
def test_the_last_integer_of_32_bits_is_returned_after_one_was_refused(value: int) -> None:
    wrapped = inference(lambda x: {"half": x / 2, "same": x})
    with pytest.raises(poptorch.Error, match="into 32 bits"):
        wrapped(torch.tensor([value]))
    border = torch.tensor([value]).clamp(-(2**31), 2**31 - 1)

    result = wrapped(border)["same"]

    assert result.dtype == torch.int32
    assert result.tolist() == border.tolist()


@each_beyond_32_bits
def test_integers_of_64_bits_are_returned_if_they_are_not_narrowed(value: int) -> None:
    opts = options()
    opts.Precision.narrow64Bit(False)

    wide = poptorch.inferenceModel(lambda x: x + 1, opts)(torch.tensor([value]))

    assert wide.dtype == torch.int64
    assert wide.item() == value + 1


# Times.


@pytest.mark.spec("runtime", 19, 20)
def test_before_compilation_the_compilation_time_is_an_error() -> None:
    with pytest.raises(poptorch.Error, match="Please compile the model"):
        inference(lambda x: x).compilationTime()


@pytest.mark.spec("runtime", 19, 20)
def test_without_the_progress_bar_no_compilation_time_exists_and_nothing_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    quiet = inference(lambda x: x)
    quiet(torch.ones(2))

    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        quiet.compilationTime()

    assert capsys.readouterr().err == ""


@pytest.mark.spec("runtime", 19, 20)
def test_with_the_progress_bar_there_is_a_compilation_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = poptorch.inferenceModel(lambda x: x, options().showCompilationProgressBar())

    shown.compile(torch.ones(2))

    assert "Graph compilation: 100%" in capsys.readouterr().err
    assert isinstance(shown.compilationTime(), datetime.timedelta)


@pytest.mark.spec("runtime", 19, 20)
def test_cycles_are_counted_only_if_asked_for() -> None:
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        inference(lambda x: x).cycleCount()


@pytest.mark.spec("runtime", 19, 20)
def test_cycles_are_those_of_a_call() -> None:
    counting = poptorch.inferenceModel(lambda x: x, options().logCycleCount(True))
    counting.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        counting.cycleCount()

    counting(torch.ones(2))

    assert counting.cycleCount() > 0
