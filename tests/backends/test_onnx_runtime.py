"""ONNX Runtime evaluates models, and what it cannot do is refused or runs elsewhere."""

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
import poptorch.testing
from helpers.folded import Mixed, check_new_weights, compiled, same
from helpers.wrapping import Having, normal, options, training
from poptorch.backends import onnx_runtime

pytestmark = pytest.mark.slow


def test_a_model_is_evaluated_with_its_weights_and_with_new_ones() -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model, "onnxruntime")

    same(executor, model, x)

    assert "runs on the onnxruntime backend" in str(executor.plan())
    check_new_weights(executor, model, x)


def test_a_saved_model_is_evaluated(tmp_path: Path) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model, "onnxruntime")
    executor(x)

    executor.save(tmp_path / "model.poptorch")

    same(poptorch.load(tmp_path / "model.poptorch"), model, x)


@pytest.mark.parametrize("check", ["inference", "results are new"])
def test_onnx_runtime_conforms_to_the_protocol(check: str) -> None:
    poptorch.testing.CONFORMANCE[check]("onnxruntime")


def test_empty_tensors_and_transposed_weights_are_passed_on() -> None:
    """A transposed weight is copied, and a constant comes after the input; ONNX drops the empty
    tensor.
    """
    weight = nn.Parameter(normal(6, 4).t())
    nothing, factors = torch.tensor([]), torch.tensor([1.0, 2, 3, 4, 5, 6])
    model = Having(lambda m, x: torch.cat([nothing, x @ m.weight * factors]), weight=weight)
    same(compiled(model, "onnxruntime"), model, normal(3, 4))


@pytest.mark.compiling_fails
def test_operators_that_onnx_does_not_have_run_on_the_reference_backend(
    caplog: pytest.LogCaptureFixture,
) -> None:
    same(compiled(Having(lambda m, x: torch.lgamma(x)), "onnxruntime"), torch.lgamma, normal(3))

    message = "reference backend: A part of this program cannot be expressed in ONNX.*\n.*lgamma"
    assert re.search(message, caplog.text)


def refusal(executor: poptorch.PoplarExecutor) -> str:
    with pytest.raises(poptorch.Error, match="can only run inference") as caught:
        executor(normal(4, 6))
    return str(caught.value)


def test_onnx_runtime_refuses_training() -> None:
    model = Having(lambda m, x: poptorch.identity_loss(m.last(x), "mean"), last=nn.BatchNorm1d(6))
    assert "a program that trains" in refusal(training(model, options("onnxruntime")))


@pytest.mark.parametrize(
    "does, forward",
    [
        ("draws random numbers", lambda m, x: F.dropout(x, training=True)),
        ("changes buffer.last.running_mean, ", lambda m, x: m.last(x)),
    ],
)
def test_inference_that_draws_or_writes_buffers_is_refused(
    does: str, forward: Callable[..., Any]
) -> None:
    model = Having(forward, last=nn.BatchNorm1d(6))
    executor = poptorch.inferenceModel(model, options("onnxruntime"))
    assert f"a program that {does}" in refusal(executor)


def test_without_the_extra_a_warning_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnx_runtime, "_NEEDED", ("absent",))
    compiled(nn.Linear(3, 2), "onnxruntime")(normal(1, 3))
    assert "needs absent: pip install 'poptorch[onnxruntime]'" in caplog.text


def doubled_summed_and_rounded(model: Having, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Several tests have this program, because exporting takes a second for the smallest one."""
    return x * 2, x.sum(1), x.to(torch.bfloat16)


def test_tensors_of_any_size_are_those_of_their_call() -> None:
    """Small ones are copied, and the session reads and writes large ones where they are."""
    model = Having(doubled_summed_and_rounded)
    executor = compiled(model, "onnxruntime")
    first, second = normal(300, 64), normal(300, 64, seed=1)
    before = executor(first)

    after = executor(second)

    torch.testing.assert_close(before, model(first))
    torch.testing.assert_close(after, model(second))


def test_results_have_types_that_numpy_does_not_know() -> None:
    executor = compiled(Having(doubled_summed_and_rounded), "onnxruntime")
    x = normal(300, 64)

    _, _, result = executor(x)

    assert torch.equal(result, x.to(torch.bfloat16))


@pytest.mark.larger("test_results_have_types_that_numpy_does_not_know")
@pytest.mark.parametrize("name", ["sum", "cumsum", "amax"])
def test_results_in_half_precision_keep_their_type(name: str) -> None:
    executor = compiled(Having(lambda m, x: getattr(x, name)(1)), "onnxruntime")
    x = normal(3, 4).half()

    result = executor(x)

    torch.testing.assert_close(result, getattr(x, name)(1))


def test_inputs_that_require_gradients_leave_no_gradient_behind() -> None:
    executor = compiled(nn.Linear(4, 3).eval(), "onnxruntime")
    x = normal(2, 4)
    executor(x)

    results = [executor(x.clone().requires_grad_()) for _ in range(3)]

    assert not any(each.requires_grad for each in results)
    torch.testing.assert_close(results[2], executor(x))


@pytest.mark.compiling_fails
def test_a_session_that_fails_after_some_calls_is_replaced_by_the_reference_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    executor = compiled(nn.Linear(4, 3).eval(), "onnxruntime")
    x = normal(2, 4)
    before = [executor(x) for _ in range(3)]

    monkeypatch.setattr(onnx_runtime._Bound, "__call__", operator.index)  # fails
    after = executor(x)

    torch.testing.assert_close(after, before[0])
    assert "cannot be interpreted as an integer" in caplog.text


def short(executor: poptorch.PoplarExecutor) -> Any:
    """Return the function that makes the next call of an executor like the last one."""
    return executor._session._bound._shortcut


def test_later_calls_run_the_session_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Mixed().eval(), normal(2, 3, 6, 5)
    executor = compiled(model, "onnxruntime")
    for _ in range(3):
        executor(x)

    monkeypatch.setattr(onnx_runtime.Sessions, "run", operator.index)  # fails

    same(executor, model, x)


def test_calls_with_and_without_a_shortcut_read_the_same_large_inputs() -> None:
    executor = compiled(Having(doubled_summed_and_rounded), "onnxruntime")
    first, second = normal(300, 64), normal(300, 64, seed=1)
    for _ in range(3):
        executor(first)
    run = executor._session.now.compiled.executable.run
    state = executor._session.weights.attached.state

    results = [short(executor)([second]), run(state, [first]), short(executor)([second])]

    torch.testing.assert_close(results[0][0], second * 2)
    torch.testing.assert_close(results[1][0], first * 2)
    torch.testing.assert_close(results[2][0], second * 2)


def test_a_shortcut_ends_with_the_weights() -> None:
    model, x = nn.Linear(4, 3).eval(), normal(2, 4)
    executor = compiled(model, "onnxruntime")
    for _ in range(3):
        executor(x)
    before = short(executor)
    with torch.no_grad():
        model.weight.mul_(2)
    executor.copyWeightsToDevice()

    same(executor, model, x)

    assert before is not None
    assert short(executor) is not before


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_shortcut_that_fails_once_is_used_again(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.Linear(4, 3).eval(), normal(2, 4)
    executor = compiled(model, "onnxruntime")
    for _ in range(3):
        executor(x)
    usual, calls = onnx_runtime._Bound.__call__, []

    def fail_once(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return usual(*args)

    monkeypatch.setattr(onnx_runtime._Bound, "__call__", fail_once)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            executor(x)
    same(executor, model, x)
    same(executor, model, x)

    assert short(executor) is not None


def test_a_session_with_inputs_beyond_the_batch_has_no_shortcut() -> None:
    executor = compiled(nn.Linear(4, 3).eval(), "onnxruntime")
    for _ in range(3):
        executor(normal(2, 4))

    assert short(executor).of_batch({}) is None


SIZES, TYPES = (3, 9000, 40000), (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_one_element_that_is_not_finite_is_found(
    size: int, dtype: torch.dtype, value: float
) -> None:
    own = torch.ones(size, dtype=dtype)
    is_finite = onnx_runtime._finite_check(own)
    before = is_finite()

    own[size // 2] = value

    assert before
    assert not is_finite()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_large_numbers_whose_sum_is_infinite_are_finite(size: int, dtype: torch.dtype) -> None:
    largest = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    assert onnx_runtime._finite_check(largest)()


def test_integers_are_finite() -> None:
    assert onnx_runtime._finite_check(torch.arange(5))()
