"""A new program is compared with eager PyTorch on the user's first micro-batch.

``captured`` tells a model whether it is being captured: a model that asks computes something else
in its program than in eager PyTorch, as a defect of the capture would.
"""

from __future__ import annotations

import contextlib
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having, options
from poptorch import _capture
from poptorch._base import log
from poptorch._capture import whole_writes
from poptorch._ir.compiler_pass import leaving_out


@pytest.fixture(autouse=True)
def _nothing_was_checked_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def captured(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "fake_mode")


def checking(reaction: str = "error", **counts: int) -> poptorch.Options:
    return options(**counts).checkAgainstEager(reaction)


def train_once(model: nn.Module, opts: poptorch.Options | None = None, rows: int = 4) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, opts or checking(), optimizer)
    try:
        return wrapped(torch.randn(rows, 3))
    finally:
        wrapped.destroy()


class Two(nn.Module):
    """Two layers and a loss; what ``change`` does between them is up to the test."""

    def __init__(self, change: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(3))
        self.change = change

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.second(self.change(self, self.first(x)))
        return out, F.mse_loss(out, torch.zeros_like(out))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x if captured(x) else 5 * x


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient if captured(gradient) else 5 * gradient


def error_of(model: nn.Module) -> str:
    with pytest.raises(poptorch.Error) as caught:
        train_once(model)
    return str(caught.value)


def test_a_model_that_agrees_trains_without_a_warning() -> None:
    model = Two(lambda self, x: F.dropout(x.tanh(), 0.5))

    _, loss = train_once(model)

    assert loss.isfinite()


class Turned(nn.Module):
    """Has a transposed weight, and an operator whose gradient depends on its layout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(3, 3) + 2 * torch.eye(3)).t())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = x @ self.weight
        return out, F.mse_loss(out, x) - torch.linalg.slogdet(self.weight).logabsdet


def test_the_layout_of_a_weight_is_not_a_difference() -> None:
    model = Turned()

    _, loss = train_once(model)

    assert loss.isfinite()


def test_another_output_is_an_error_that_names_it() -> None:
    message = error_of(Two(lambda self, x: 2 * x if captured(x) else x))

    assert "output 0 differs by" in message


def test_another_gradient_is_an_error_that_names_the_parameter() -> None:
    message = error_of(Two(lambda self, x: WrongGradient.apply(x)))

    assert "the gradient of 'first.weight' differs by" in message


def test_a_wrong_gradient_of_one_parameter_is_not_attributed_to_others() -> None:
    message = error_of(Two(lambda self, x: WrongGradient.apply(x)))

    assert "second.weight" not in message


def test_another_value_of_a_buffer_is_an_error_that_names_it() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(2.0 if captured(x) else 1.0)
        return x

    assert "the new value of buffer 'seen' differs by 1" in error_of(Two(change))


def test_a_write_that_only_eager_pytorch_makes_is_an_error() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not captured(x):
            self.first.bias.data = self.first.bias.data + 1
        return x

    assert "the new value of parameter 'first.bias' differs by 1" in error_of(Two(change))


def test_a_branch_on_the_class_of_a_parameter_is_noticed_where_the_program_took_another() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(self.first.weight, nn.Parameter) and not captured(x)
        return x if is_parameter else 2 * x

    assert "output 0 differs by" in error_of(Two(change))


def test_a_backward_hook_that_acts_differently_is_noticed() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda gradient: gradient * (0.5 if captured(gradient) else 1.0))
        return x

    assert "the gradient of 'first.weight' differs by" in error_of(Two(change))


def test_a_draw_that_only_the_program_makes_is_noticed() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        extra = torch.rand_like(x) if captured(x) else 0.5
        return x * torch.rand_like(x) + extra

    assert "the program draws 2 random tensors for a micro-batch, eager PyTorch 1" in error_of(
        Two(change)
    )


def test_a_draw_of_another_shape_is_noticed() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(4, 3) if captured(x) else torch.rand(3))

    assert "the program draws torch.float32 [4, 3]" in error_of(Two(change))


def test_a_repeated_draw_that_the_program_does_not_repeat_is_noticed() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = torch.get_rng_state()
        once = torch.rand_like(x)
        if not captured(x):
            torch.set_rng_state(state)
        return x * once * torch.rand_like(x)

    assert "the program draws 2 random tensors for a micro-batch, eager PyTorch 1" in error_of(
        Two(change)
    )


def test_the_first_layer_that_differs_is_named_with_its_class() -> None:
    model = Two(lambda self, x: self.third(x))
    model.third = Doubled()

    message = error_of(model)

    assert "the first layer that differs is 'third' (Doubled), in its result" in message


@pytest.mark.larger("test_the_first_layer_that_differs_is_named_with_its_class")
def test_the_layer_behind_which_a_gradient_differs_is_named() -> None:
    message = error_of(Two(lambda self, x: WrongGradient.apply(x)))

    assert "the first layer that differs is 'first' (Linear), in the gradient" in message


def test_the_remedy_names_the_first_layer_that_differs() -> None:
    model = Two(lambda self, x: self.third(x))
    model.third = Doubled()

    assert "remove 'third' from the wrapped model" in error_of(model)


def test_the_remedy_names_no_layer_if_none_differs() -> None:
    factors = iter([1.0, 2.0])

    message = error_of(Two(lambda self, x: x * next(factors)))

    assert "compute the values that differ with other operators" in message


def test_the_users_line_is_named() -> None:
    model = Two(lambda self, x: self.third(x))
    model.third = Doubled()

    assert "return 2 * x if captured(x) else 5 * x" in error_of(model)


def test_a_difference_is_one_warning_if_asked_for(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POPTORCH_CHECK_AGAINST_EAGER")
    model = Two(lambda self, x: 2 * x if captured(x) else x)

    train_once(model, options())

    assert caplog.text.count("does not agree with eager PyTorch") == 1


def test_check_against_eager_off_compares_nothing() -> None:
    model = Two(lambda self, x: 2 * x if captured(x) else x)

    _, loss = train_once(model, checking("off"))

    assert loss.isfinite()


def test_another_argument_of_check_against_eager_is_refused() -> None:
    with pytest.raises(ValueError, match="loud"):
        poptorch.Options().checkAgainstEager("loud")


def test_inference_is_compared_too() -> None:
    model = Having(lambda self, x: 2 * x if captured(x) else x)

    with pytest.raises(poptorch.Error, match="does not agree with eager"):
        poptorch.inferenceModel(model, checking())(torch.randn(4, 3))


class Encoder(nn.Module):
    def __init__(self, **settings: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, **settings)

    def forward(self, x: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
        return self.encoder(x, src_key_padding_mask=padded)


PADDED = torch.tensor([[False, False, True], [False, False, False]])


def test_zeros_that_only_eager_pytorch_writes_at_padded_positions_are_explained() -> None:
    wrapped = poptorch.inferenceModel(Encoder().eval(), checking())
    with pytest.raises(
        poptorch.Error, match="zeros in eager PyTorch where src_key_padding_mask is"
    ) as raised:
        wrapped(torch.randn(2, 3, 4), PADDED)
    assert "enable_nested_tensor=False" in str(raised.value)


def test_an_encoder_without_nested_tensors_agrees_at_padded_positions() -> None:
    wrapped = poptorch.inferenceModel(Encoder(enable_nested_tensor=False).eval(), checking())
    assert wrapped(torch.randn(2, 3, 4), PADDED).shape == (2, 3, 4)


def test_another_difference_of_an_encoder_is_not_attributed_to_padding() -> None:
    model = nn.Sequential(Encoder().encoder, Doubled()).eval()
    wrapped = poptorch.inferenceModel(model, checking())
    with pytest.raises(poptorch.Error, match="remove '1' from the wrapped model"):
        wrapped(torch.randn(2, 3, 4))


def test_another_complex_type_is_an_error() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.fft(x)
        return spectrum.real if captured(x) else spectrum

    with pytest.raises(poptorch.Error, match=r"torch.float32 instead of torch.complex64"):
        poptorch.inferenceModel(Having(function), checking())(torch.randn(4, 3))


def test_the_program_is_compared_on_the_first_micro_batch() -> None:
    rows = []

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not captured(x):
            rows.append(x.clone())
        return x + 1

    x = torch.randn(8, 3)
    poptorch.inferenceModel(Having(function), checking(iterations=4))(x)

    assert torch.equal(rows[0], x[:2])


def test_eager_pytorch_runs_forward_once() -> None:
    calls = []

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(captured(x))
        return x * 1.5

    poptorch.inferenceModel(Having(function), checking())(torch.randn(4, 3))

    assert calls.count(False) == 1


def test_a_program_that_was_checked_is_not_checked_again() -> None:
    calls = []

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(captured(x))
        return x * 2.5

    for _ in range(2):
        poptorch.inferenceModel(Having(function), checking())(torch.randn(4, 3))

    assert calls.count(False) == 1


def test_a_model_with_other_code_is_checked_although_its_program_is_known() -> None:
    def right(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 4.5

    def wrong(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x * (4.5 if captured(x) else 5.5)

    poptorch.inferenceModel(Having(right), checking())(torch.randn(4, 3))

    with pytest.raises(poptorch.Error, match="does not agree with eager PyTorch"):
        poptorch.inferenceModel(Having(wrong), checking())(torch.randn(4, 3))


def test_models_that_eager_pytorch_refuses_are_not_compared() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not captured(x):
            raise RuntimeError("not here")
        return x + 3

    out = poptorch.inferenceModel(Having(function), checking())(torch.zeros(4, 3))

    assert torch.equal(out, torch.full((4, 3), 3.0))


def test_where_memory_is_short_nothing_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poptorch._compile.eager_check_policy.available_memory", lambda: 1)
    model = Two(lambda self, x: 2 * x if captured(x) else x)

    _, loss = train_once(model)

    assert loss.isfinite()


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def threads_of_the_check(model: Having, numbers: list[int]) -> int:
    """Return the number of threads with which eager PyTorch ran ``forward``."""
    poptorch.inferenceModel(model, checking())(torch.randn(4, 3))
    return numbers[-1]


@pytest.fixture
def recorded() -> tuple[Having, list[int]]:
    """A model, and the numbers of threads with which its ``forward`` ran outside the capture."""
    numbers = list[int]()

    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not captured(x):
            numbers.append(torch.get_num_threads())
        return x * 1.5

    return Having(function), numbers


def test_a_small_program_is_compared_with_one_thread(
    two_threads: None, recorded: tuple[Having, list[int]]
) -> None:
    assert threads_of_the_check(*recorded) == 1


def test_a_large_program_is_compared_with_the_threads_of_the_process(
    two_threads: None, recorded: tuple[Having, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._compile.eager_check_policy._SMALL", 0.0)
    monkeypatch.setattr("poptorch._compile.eager_check_policy.is_crowded", lambda: False)

    assert threads_of_the_check(*recorded) == 2


def test_a_large_program_is_compared_with_one_thread_while_other_processes_need_the_cores(
    two_threads: None, recorded: tuple[Having, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("poptorch._compile.eager_check_policy._SMALL", 0.0)
    monkeypatch.setattr("poptorch._compile.eager_check_policy.is_crowded", lambda: True)

    assert threads_of_the_check(*recorded) == 1


class Attending(nn.Module):
    """Attention whose results have other strides than in the capture, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.attention(x, x, x, need_weights=False)[0]
        return nn.functional.mse_loss(found, x)


def test_micro_batches_with_attention_are_compared_side_by_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger=log.engine.name)
    model = Attending()
    opts = checking()
    opts.Training.gradientAccumulation(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    poptorch.trainingModel(model, opts, optimizer)(torch.randn(6, 5, 8))

    assert "were not compared" not in caplog.text


# A wrong pass of the compiler is found.


def doubling_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x * 1
    x.mul_(2)
    return x


@pytest.fixture
def wrong_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A defect in a step of the capture: products in place become quotients."""
    aten = torch.ops.aten
    monkeypatch.setitem(whole_writes._PURE, aten.mul_.Tensor, aten.div.Tensor)


@pytest.fixture
def warning_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A difference is a warning, as it is for users."""
    monkeypatch.delenv("POPTORCH_CHECK_AGAINST_EAGER")


def test_a_wrong_pass_is_named(wrong_writes: None) -> None:
    message = error_of(Two(doubling_in_place))

    assert "without the pass 'whole writes' the program agrees with eager PyTorch" in message


@pytest.mark.larger("test_a_wrong_pass_is_named")
def test_the_message_on_a_wrong_pass_names_the_results_that_differ(wrong_writes: None) -> None:
    message = error_of(Two(doubling_in_place))

    assert "output 0 differs by" in message


def test_the_program_is_compiled_without_a_wrong_pass(
    wrong_writes: None, warning_only: None, caplog: pytest.LogCaptureFixture
) -> None:
    model = Two(doubling_in_place)
    x = torch.randn(4, 3)
    expected, _ = model(x)

    out, _ = poptorch.inferenceModel(model, options())(x)

    torch.testing.assert_close(out, expected.detach())
    assert caplog.text.count("A pass of the compiler changes the results") == 1


@pytest.mark.larger("test_the_program_is_compiled_without_a_wrong_pass")
def test_the_last_smaller_micro_batch_is_compiled_without_a_wrong_pass(
    wrong_writes: None, warning_only: None
) -> None:
    model = poptorch.inferenceModel(Having(doubling_in_place), options(iterations=2))
    x = torch.randn(4, 3)
    model(x)

    out = model(x[:3])

    torch.testing.assert_close(out, 2 * x[:3])


def test_a_wrong_pass_that_changes_nothing_here_is_not_named(wrong_writes: None) -> None:
    message = error_of(Two(lambda self, x: 2 * x if captured(x) else x))

    assert "pass" not in message


def test_the_search_for_a_wrong_pass_leaves_attributes_as_forward_left_them(
    wrong_writes: None, warning_only: None
) -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return doubling_in_place(self, x)

    executor = poptorch.inferenceModel(Two(change), options())

    executor(torch.randn(4, 3))

    assert executor.calls == 1


def test_a_difference_is_reported_if_forward_cannot_run_once_more() -> None:
    factors = iter([1.0, 2.0])

    message = error_of(Two(lambda self, x: x * next(factors)))

    assert "does not agree with eager PyTorch" in message


@pytest.mark.parametrize("name", _capture.SHORTCUTS)
def test_a_capture_without_one_of_its_steps_agrees(name: str) -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(x.tanh(), 0.5)
        x.mul_(2)
        return x.tanh()

    with leaving_out([name]):
        _, loss = train_once(Two(change))

    assert loss.isfinite()


# What forward changes is put back.


class Changing(nn.Module):
    """Changes everything that it can reach in eager PyTorch, and draws in its program, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(3))
        self.plain = torch.zeros(3)
        self.calls, self.history, self.table = 0, [1], {"a": [1]}
        self.generator = torch.Generator().manual_seed(5)
        self.fails: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        if not captured(x):
            self.plain += 1
            self.calls += 1
            self.history.append(2)
            self.table["a"].append(2)
            self.table["b"] = 1
            self.layer.eval()
            random.random()
            np.random.rand()
            if self.fails is not None:
                raise self.fails
        out = self.layer(x)
        torch.rand(1)
        torch.rand(1, generator=self.generator)
        return out, F.mse_loss(out, torch.zeros_like(out))


def changing(fails: type[BaseException] | None = None) -> Changing:
    """Return a model after a call that was checked; ``fails``: what eager PyTorch raises then."""
    model = Changing()
    model.fails = fails
    model.layer.weight.grad = torch.ones(3, 3)
    wrapped = poptorch.trainingModel(model, checking(), torch.optim.SGD(model.parameters(), lr=0.1))
    with contextlib.suppress(KeyboardInterrupt):
        wrapped(torch.randn(4, 3))
    wrapped.destroy()
    return model


@pytest.fixture(params=[None, RuntimeError, KeyboardInterrupt], ids=["ran", "failed", "stopped"])
def changed(request: pytest.FixtureRequest) -> Changing:
    return changing(request.param)


def test_a_buffer_has_only_the_writes_of_the_call(changed: Changing) -> None:
    calls = 0 if changed.fails is KeyboardInterrupt else 1

    assert torch.equal(changed.count, torch.full((3,), calls))


def test_tensors_in_attributes_are_put_back(changed: Changing) -> None:
    assert torch.equal(changed.plain, torch.zeros(3))


def test_numbers_in_attributes_are_put_back(changed: Changing) -> None:
    assert changed.calls == 0


def test_lists_are_put_back(changed: Changing) -> None:
    assert changed.history == [1]


def test_dictionaries_are_put_back(changed: Changing) -> None:
    assert changed.table == {"a": [1]}


def test_modes_are_put_back(changed: Changing) -> None:
    assert changed.layer.training


def test_gradients_are_put_back(changed: Changing) -> None:
    assert torch.equal(changed.layer.weight.grad, torch.ones(3, 3))


def test_generators_of_the_user_are_put_back(changed: Changing) -> None:
    expected = torch.Generator().manual_seed(5).get_state()

    assert torch.equal(changed.generator.get_state(), expected)


@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
def test_torchs_random_state_is_put_back(fails: type[BaseException] | None) -> None:
    torch.manual_seed(7)
    changing()
    state = torch.get_rng_state()
    torch.manual_seed(7)

    changing(fails)

    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
def test_pythons_random_state_is_put_back(fails: type[BaseException] | None) -> None:
    state = random.getstate()

    changing(fails)

    assert random.getstate() == state


@pytest.mark.parametrize("fails", [None, RuntimeError, KeyboardInterrupt])
def test_numpys_random_state_is_put_back(fails: type[BaseException] | None) -> None:
    state = np.random.get_state()[1].copy()

    changing(fails)

    assert np.array_equal(np.random.get_state()[1], state)


def test_warnings_of_forward_are_not_shown_twice() -> None:
    def function(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not captured(x):
            warnings.warn("seen in eager PyTorch", stacklevel=1)
        return x * 3.5

    out = poptorch.inferenceModel(Having(function), checking())(torch.ones(4, 3))

    assert torch.equal(out, torch.full((4, 3), 3.5))


# No false alarms.


def test_noise_around_zero_is_not_a_difference() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(0, keepdim=True)  # the bias of the first layer has no gradient

    _, loss = train_once(Two(change), rows=64)

    assert loss.isfinite()


def test_a_chaotic_model_widens_its_own_bound() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = torch.sigmoid(x)
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x.sum(1, keepdim=True) * (1 + 1e-6 * captured(x)) * torch.ones(1, 3)

    _, loss = train_once(Two(change))

    assert loss.isfinite()


def test_a_draw_that_nobody_reads_is_not_a_difference() -> None:
    def change(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.rand_like(x)
        return x * torch.rand_like(x)

    _, loss = train_once(Two(change))

    assert loss.isfinite()


def test_weights_of_64_bits_are_compared_within_the_rounding_of_32() -> None:
    model = Two(lambda self, x: x.tanh()).double()
    wrapped = poptorch.trainingModel(model, checking(), torch.optim.SGD(model.parameters(), lr=0.1))

    _, loss = wrapped(torch.randn(4, 3, dtype=torch.float64))

    assert loss.isfinite()


def test_results_of_eight_bits_are_compared() -> None:
    def rounded(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (x / (0 if captured(x) else 1)).to(torch.float8_e5m2)

    with pytest.raises(poptorch.Error, match="12 elements are infinite or NaN"):
        poptorch.inferenceModel(Having(rounded), checking())(torch.randn(4, 3))


def test_equal_results_of_eight_bits_are_no_difference() -> None:
    x = torch.randn(4, 3)

    out = poptorch.inferenceModel(Having(lambda self, x: x.to(torch.float8_e5m2)), checking())(x)

    assert torch.equal(out.float(), x.to(torch.float8_e5m2).float())
