"""A program does not follow some changes on the host: each causes one warning."""

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import poptorch
from helpers.cases import every_pair
from helpers.wrapping import PAUSE, Calling, Graded, Having, inference, options, training
from poptorch._base.thread_safety import only_in_this_thread
from poptorch._session.host_changes import ChangeCheck, PeriodicChecks, periodic_checks

X, Y = torch.randn(2, 3), torch.randn(2, 2)
NOT_FOLLOWED = "The compiled program does not follow what changed on the host: "


@pytest.fixture(autouse=True)
def checks_are_never_postponed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_checks, "CHEAP", 60.0)
    monkeypatch.setattr(periodic_checks, "PARTS", 1)


def test_a_long_check_postpones_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(periodic_checks, "FIRST", 1)
    checks = PeriodicChecks(ChangeCheck(lambda: 0, lambda _: [], ""))
    monkeypatch.setattr(time, "monotonic", iter([100.0, 100.01]).__next__)
    checks.run([], None)
    assert checks.due == pytest.approx(101.0)


def number_of_checks(
    monkeypatch: pytest.MonkeyPatch, seconds_between: float, first: int = 0
) -> int:
    """Return how often two calls check, with a pause between them; a check takes 0.1 ms."""
    made: list[int] = []
    checks = PeriodicChecks(ChangeCheck(lambda: made.append(1), lambda _: [], ""))
    made.clear()
    monkeypatch.setattr(periodic_checks, "FIRST", first)
    later = 100.0 + seconds_between
    monkeypatch.setattr(time, "monotonic", iter([100.0, 100.0001, later, later + 0.0001]).__next__)
    for _ in range(2):
        checks.run([], None)
    return len(made)


def test_a_call_after_a_pause_is_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert number_of_checks(monkeypatch, seconds_between=0.12) == 2
    assert number_of_checks(monkeypatch, seconds_between=0.01) == 1


def test_frequent_calls_share_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(periodic_checks, "PARTS", 4)
    monkeypatch.setattr(periodic_checks, "FIRST", 1)
    made: list[int] = []
    rows = [ChangeCheck(functools.partial(made.append, at), lambda _: [], "") for at in range(7)]
    checks = PeriodicChecks(ChangeCheck(lambda: made.append(7), lambda _: [], ""))
    clock = itertools.chain.from_iterable((at, at + 1e-4) for at in itertools.count(100, 0.03))
    monkeypatch.setattr(time, "monotonic", clock.__next__)
    checks.run(rows, None)
    made.clear()

    checks.run(rows, None)
    of_one_call = made.copy()
    for _ in range(3):
        checks.run(rows, None)

    assert len(of_one_call) == 2
    assert sorted(made) == [*range(8)]


def test_the_first_calls_are_always_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert number_of_checks(monkeypatch, seconds_between=0.005, first=2) == 2


def test_the_second_call_warns_of_weights_that_changed_right_after_the_first(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    executor = inference(model)
    executor(X)
    nn.init.ones_(model.first.weight)
    executor(X)
    assert (
        "'first.weight' on the host, but the device continues to use its own values" in caplog.text
    )


def test_the_second_of_two_long_validations_warns_of_weights_that_changed_in_between(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(periodic_checks, "CHEAP", 1e-12)  # the next look that is due is far away
    model = Net()
    executor = inference(model)
    executor(X)
    executor._session.weights.periodic_checks._latest = -3600.0
    executor._session.weights.periodic_checks._calls = periodic_checks.FIRST
    nn.init.ones_(model.first.weight)
    executor(X)
    assert (
        "'first.weight' on the host, but the device continues to use its own values" in caplog.text
    )


def run(executor: poptorch.PoplarExecutor, calls: int = 1) -> torch.Tensor:
    """Call it so that what changed is looked at."""
    for _ in range(calls):
        time.sleep(PAUSE)
        result = executor(X, Y) if executor._optimizer is not None else executor(X)
    return result


class Net(Graded):
    def __init__(self) -> None:
        super().__init__(first=nn.Linear(3, 4), tanh=nn.Tanh(), second=nn.Linear(4, 2))


class Shift(nn.Module):
    def train(self, mode: bool = True) -> "Shift":
        self.size = 1.0 if mode else 0.0
        return super().train(mode)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.size


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Holds(Net):
    """Numbers, lists, tensors and settings that the program has as constants; some it has not."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.shift, self.norm = nn.Dropout(0.5), Shift().train(), nn.BatchNorm1d(3)
        self.register_buffer("heat", torch.ones(()))
        self.temperature, self.calls, self._private, self.kept = 1.0, 0, 1, None
        self.factors, self.settings = [1.0, 2.0], {"shift": 0.5, "sizes": (1, 2)}
        self.mask, self.masks = torch.tensor([1.0, 0.0, 1.0]), [torch.ones(3), torch.zeros(3)]
        self.config, self.args = Config(), argparse.Namespace(offset=0.0)
        self.log, self.seen, self.unused = [0.0], {"first": 0.0}, torch.zeros(3)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        x = self.shift(self.drop(self.norm(x))) / self.temperature * self.heat
        x = x * self.factors[1] + self.settings["shift"] * self.mask + self.masks[0]
        return super().forward(x * self.config.scale + self.args.offset, y)

    def change_between_calls(self, call: int) -> None:
        """What may change between calls."""
        self.calls += 1  # forward counts, too
        self._private += 1
        self.log.append(1.0)
        self.seen[str(call)] = 1.0
        self.unused = torch.full((3,), float(call))
        assert self.norm.running_mean.isfinite().all()  # comes down


def triple(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda first, *rest: forward(3 * first, *rest)


CHANGES = [  # each of which the one message names
    {
        "temperature was 1.0 and is 0.5": lambda m: setattr(m, "temperature", 0.5),
        "factors was [1.0, 2.0] and is [1.0, 3": lambda m: m.factors.__setitem__(1, 3.0),
        "settings was {'shift': 0.5,": lambda m: m.settings.update(shift=1.0),
        "is tensor([0., 0., 0.])": lambda m: setattr(m, "mask", torch.zeros(3)),
        "Holds.masks was [tensor(": lambda m: m.masks.__setitem__(0, torch.zeros(3)),
        "Linear.parametrizations": lambda m: parametrizations.weight_norm(m.second),
    },
    {
        "is tensor([1., 1.])": lambda m: setattr(m, "temperature", torch.ones(2)),
        "Dropout.p of drop was 0.5 and is None": lambda m: delattr(m.drop, "p"),
        "factors was [1.0, 2.0] and is [1.0]": lambda m: m.factors.pop(),
        "and is {'shift': 0.5, 'sizes': (1, 3)}": lambda m: m.settings.update(sizes=(1, 3)),
        "1 hook on layers": lambda m: m.second.register_forward_hook(lambda *_: None),
        "'second.weight' on the host": lambda m: m.second.weight.detach().zero_(),
    },
    {
        "Holds.mask was changed in place": lambda m: m.mask.zero_(),
        "Dropout.p of drop was 0.5 and is 0.1": lambda m: setattr(m.drop, "p", 0.1),
        "Config.scale of config was 1.0": lambda m: setattr(m.config, "scale", 2.0),
        "Namespace.offset of args was 0.0": lambda m: setattr(m.args, "offset", 1.0),
    },
    {
        "Holds.masks was changed in place": lambda m: m.masks[0].zero_(),
        "3 hooks on": lambda m: (
            m.first.register_forward_pre_hook(lambda *_: None),
            m.first.register_full_backward_hook(lambda *_: None),
            m.first.register_full_backward_pre_hook(lambda *_: None),
        ),
        "forward of a Linear": lambda m: triple(m.second),
        "_grad of first.weight is now False": lambda m: m.first.weight.requires_grad_(False),
        "'first.bias' on the host": lambda m: nn.init.ones_(m.first.bias),
    },
    {
        "forward of a Holds": triple,
        "' on the host": lambda m: m.load_state_dict({**m.state_dict(), **Net().state_dict()}),
    },
    {"'heat' on the host": lambda m: m.heat.fill_(0.5)},
    {
        "Namespace.offset of args was": lambda m: setattr(
            m, "args", argparse.Namespace(offset=1.0)
        ),
        "'first.weight' on the host": lambda m: setattr(
            m.first, "weight", nn.Parameter(torch.ones(4, 3))
        ),
    },
    {
        "' on the host": lambda m: m.load_state_dict(
            {name: value + 1 for name, value in m.state_dict().items()}, assign=True
        )
    },
    {
        "Holds.second)": lambda m: setattr(m, "second", nn.Linear(4, 2)),
        "the number format was float32 and is bfloat16": lambda m: m.bfloat16(),
    },
]
NUMBERED = {f"changes{number}": changes for number, changes in enumerate(CHANGES)}
WRAPPERS = {"training": training, "inference": inference}


@pytest.mark.parametrize(("changes", "wrap"), every_pair(NUMBERED, WRAPPERS))
def test_one_message_lists_all_changes_once(
    wrap: Callable[..., Any],
    changes: dict[str, Callable[..., Any]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holds()
    executor = wrap(model)
    for call in range(2):
        run(executor)
        model.change_between_calls(call)
        assert model.first.weight.isfinite().all()  # comes down where it was trained
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    run(executor)  # written with their own values
    nn.init.uniform_(model.second.weight)  # and copied
    executor.copyWeightsToDevice()
    run(executor)
    assert NOT_FOLLOWED not in caplog.text
    for do in changes.values():
        do(executor.model if wrap is inference and "Holds.second)" in changes else model)
    run(executor, 3)
    (message,) = [
        record.getMessage() for record in caplog.records if NOT_FOLLOWED in record.getMessage()
    ]
    assert [part for part in changes if part not in message] == []


def test_one_warning_names_a_number_that_needs_set_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holds()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(executor)
    scheduler.step()
    executor.setOptimizer(optimizer)
    run(executor)
    assert NOT_FOLLOWED not in caplog.text
    scheduler.step()
    model.temperature = 2.0
    model.norm.running_mean.fill_(3.0)  # which training moves
    run(executor, 3)
    (message,) = [
        record.getMessage() for record in caplog.records if NOT_FOLLOWED in record.getMessage()
    ]
    assert "lr of the optimizer's group 0 was 0.05 and is 0.025" in message
    assert "destroy()" in message
    assert (
        "'norm.running_mean' on the host, but the device continues to use its own values" in message
    )
    assert "setOptimizer(optimizer)" in message


@pytest.mark.parametrize("wrap", [training, inference])
def test_a_program_that_is_compiled_again_contains_the_changes(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    executor = wrap(model)
    run(executor, 2)
    executor.model.second = nn.Linear(4, 2)
    executor.model.second.bias = None
    executor.destroy()
    run(executor)
    model.first.weight.register_hook(lambda gradient: gradient * 0)
    triple(model.second)
    executor.destroy()
    executor, before = wrap(model), model.first.weight.clone()
    expected = model(X, Y) if wrap is training else model(X)
    torch.testing.assert_close(run(executor), expected.detach())
    run(executor, 2)
    assert torch.equal(model.first.weight, before)
    assert NOT_FOLLOWED not in caplog.text


REGISTER = [
    nn.modules.module.register_module_forward_hook,
    nn.modules.module.register_module_forward_pre_hook,
    nn.modules.module.register_module_full_backward_hook,
    nn.modules.module.register_module_full_backward_pre_hook,
]


@pytest.mark.parametrize("register", REGISTER)
def test_a_warning_names_a_hook_on_all_modules_that_is_registered_later(
    register: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    executor = inference(Net())
    run(executor)

    with register(lambda *_: None):
        run(executor, 3)

    assert caplog.text.count("1 hook on all modules") == 1


def test_a_warning_says_that_a_hook_on_all_modules_was_removed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = inference(Net())
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        run(executor)

    run(executor)

    assert "1 hook on all modules" in caplog.text


def test_a_model_is_compiled_with_a_hook_on_all_modules_after_destroy() -> None:
    model = nn.Linear(3, 2)
    executor = inference(model)
    run(executor)

    with nn.modules.module.register_module_forward_hook(lambda _, args, result: result * 2):
        executor.destroy()
        result, expected = run(executor), model(X)

    torch.testing.assert_close(result, expected)


def test_hooks_of_a_capture_in_another_thread_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = inference(Net())
    run(executor)

    hook = only_in_this_thread(lambda *_: None)
    with nn.modules.module.register_module_forward_hook(hook):
        run(executor)

    assert NOT_FOLLOWED not in caplog.text


@pytest.fixture
def default_type() -> Iterator[Callable[[torch.dtype], None]]:
    """Return the function that sets torch's default type, which is restored after the test."""
    before = torch.get_default_dtype()
    yield torch.set_default_dtype
    torch.set_default_dtype(before)


@pytest.mark.parametrize(
    "function",
    [
        lambda _, x: x * torch.ones(3),
        lambda _, x: x + torch.arange(3) / 2,
        lambda _, x: x * torch.tensor(0.5),
        lambda _, x: torch.where(x > 0, 1.0, 0.0),
    ],
    ids=["ones", "a quotient", "a constant", "numbers"],
)
def test_a_warning_names_another_default_type_if_the_program_uses_it(
    function: Callable[..., Any],
    default_type: Callable[[torch.dtype], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    executor = poptorch.inferenceModel(Having(function), options())
    run(executor)

    default_type(torch.float64)
    run(executor, 3)

    assert caplog.text.count("set_default_dtype(torch.float64), which was torch.float32") == 1


def test_another_default_type_causes_no_warning_if_the_program_does_not_use_it(
    default_type: Callable[[torch.dtype], None], caplog: pytest.LogCaptureFixture
) -> None:
    executor = inference(Net())
    run(executor)

    default_type(torch.float64)
    run(executor)

    assert NOT_FOLLOWED not in caplog.text


def test_a_warning_names_hooks_that_an_optimizer_gets_later(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    run(executor)
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    for _ in range(2):
        executor.setOptimizer(optimizer)
        run(executor)
    assert caplog.text.count("2 hooks of the optimizer's step") == 1


@pytest.mark.parametrize("wrap", [training, inference])
def test_a_warning_names_a_block_that_is_added_too_late(
    wrap: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    executor = wrap(Net())
    model = executor.model
    poptorch.BeginBlock(model.first, ipu_id=0)
    run(executor)
    assert "BeginBlock" not in caplog.text
    poptorch.BeginBlock(model.second, ipu_id=1)
    assert (
        caplog.text.count("BeginBlock was called on a Linear of a model that is already compiled")
        == 1
    )
    run(executor)
    assert NOT_FOLLOWED not in caplog.text
    executor.destroy()
    poptorch.removeBlocks(model)
    poptorch.BeginBlock(model.first, ipu_id=0)
    assert caplog.text.count("BeginBlock was called on a") == 1


def test_one_warning_names_a_class_whose_forward_was_replaced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    executor = inference(model)
    before = run(executor)
    model.first.bias.untyped_storage().resize_(0)  # whose memory is gone is not looked at
    assert torch.equal(run(executor), before)
    assert NOT_FOLLOWED not in caplog.text
    model.first.bias.untyped_storage().resize_(16)
    nn.init.zeros_(model.first.bias)
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: original(layer, 3 * x))
    assert torch.equal(run(executor, 4), before)
    assert caplog.text.count("forward of a Linear") == 1
    executor.destroy()
    torch.testing.assert_close(run(executor), model(X))


def edit(model: Holds) -> None:
    model.drop.p, model.temperature = 0.0, 2.0
    model.mask, model.factors = torch.zeros(3), [0.0, 5.0]
    model.config, model.args = Config(3.0), argparse.Namespace(offset=1.0)


def test_changes_between_wrapping_and_compiling_take_effect_in_training(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holds()
    model.second.requires_grad_(False)
    executor = training(model)
    edit(model)
    for mode in (True, False, True):  # a number that belongs to a mode is followed, too
        model.train(mode)
        expected = copy.deepcopy(model)(X, Y).detach()
        torch.testing.assert_close(run(executor), expected)
    model.mask = model.mask.clone()
    run(executor)
    assert NOT_FOLLOWED not in caplog.text  # the values are the same
    model.mask = torch.ones(3)
    nn.init.ones_(model.second.weight)
    executor.copyWeightsToHost()
    run(executor)
    assert "mask was tensor([0., 0., 0.]) and is tensor([1., 1., 1.])" in caplog.text
    assert "'second.weight' on the host" in caplog.text  # fixed, though others came down


def test_a_warning_lists_changes_between_wrapping_for_inference_and_compilation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holds().eval()
    expected, executor = model(X).detach(), inference(model)
    edit(model)
    triple(model)
    for _ in range(3):
        torch.testing.assert_close(run(executor), expected)
    assert caplog.text.count(NOT_FOLLOWED) == 1
    for message in (
        "temperature was 1.0 and is 2.0",
        "is tensor([0., 0., 0.])",
        "forward of a Holds",
        "Config.scale of config was 1.0 and is 3.0",
    ):
        assert message in caplog.text


# Values that are equal for Python, and with which a model may compute something else.
EQUAL: dict[str, tuple[Any, Any, str]] = {
    "the sign of zero": (0.0, -0.0, "was 0.0 and is -0.0"),
    "an integer and a number": (2, 2.0, "was 2 and is 2.0"),
    "a number and a flag": (1, True, "was 1 and is True"),
    "in a list": ([1.0, 0.0], [1.0, -0.0], r"was [1.0, 0.0] and is [1.0, -0.0]"),
    "in a dictionary": ({"scale": 0.0}, {"scale": -0.0}, "was {'scale': 0.0} and is {'scale': -0."),
}


@pytest.mark.parametrize(("before", "after", "message"), EQUAL.values(), ids=EQUAL)
def test_a_warning_names_an_attribute_whose_new_value_is_equal_but_not_the_same(
    before: Any, after: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Holds().eval()
    model.number = before
    executor = inference(model)
    run(executor)

    model.number = after
    run(executor)

    assert f"Holds.number {message}" in caplog.text


def test_an_attribute_that_is_not_a_number_and_stays_causes_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Holds().eval()
    model.temperature = float("nan")
    executor = inference(model)
    run(executor)

    model.temperature = float("nan")
    run(executor)

    assert NOT_FOLLOWED not in caplog.text


class Deciding(nn.Module):
    """A model whose tensors are no buffers, and decide a branch and a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = torch.tensor(True)
        self.limits = [torch.tensor(2.0)]
        self.mask = torch.tensor([True, False, True])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Select elements, and scale them twice."""
        scaled = x * 2 if self.flag else x
        return (scaled * 3 if self.limits[0] > 1 else scaled)[:, self.mask]


DECIDING: dict[str, Callable[[Any], object]] = {
    "flag was tensor(True) and is tensor(False)": lambda m: setattr(m, "flag", torch.tensor(False)),
    "Deciding.flag was changed in place": lambda m: m.flag.fill_(False),
    "limits was [tensor(2.)] and": lambda m: m.limits.__setitem__(0, torch.tensor(0.0)),
    "Deciding.limits was changed in place": lambda m: m.limits[0].zero_(),
    "mask was tensor([ True, False, True]) and": lambda m: setattr(m, "mask", ~m.mask),
    "Deciding.mask was changed in place": lambda m: m.mask.fill_(True),
}


@pytest.mark.parametrize(("message", "change"), DECIDING.items(), ids=DECIDING)
def test_a_warning_names_a_tensor_that_decided_and_is_no_buffer(
    message: str, change: Callable[[nn.Module], object], caplog: pytest.LogCaptureFixture
) -> None:
    model = Deciding()
    executor = inference(model)
    executor(torch.ones(2, 3))

    change(model)
    executor(torch.ones(2, 3))

    assert message in caplog.text


def test_tensors_that_decided_and_stay_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    executor = inference(Deciding())

    for _ in range(2):
        executor(torch.ones(2, 3))

    assert NOT_FOLLOWED not in caplog.text


@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_on_the_host_causes_one_warning(
    clip: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Net, "__len__", lambda model: 0, raising=False)  # as those that count
    model = Net()
    executor = training(model)
    for _ in range(3):
        run(executor)
        list(model.parameters())
        run(executor)
        with contextlib.suppress(RuntimeError):  # clip_grad_value_ wants a gradient
            getattr(nn.utils, clip)(model.parameters(), 1.0)
    assert caplog.text.count(f"{clip} finds no gradients in a model that is wrapped") == 1


def test_weights_that_were_restored_or_come_from_a_trainer_cause_no_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    validation, trainer = inference(model), training(model)
    loss = Calling(lambda x: poptorch.identity_loss(x.pow(2).mean(), reduction="none"))
    other = training(nn.Sequential(model.first, nn.Flatten(), loss))
    for _ in range(2):
        trainer(X, Y)
        other(X)
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        validation.load_state_dict(Net().state_dict())  # as averaged weights for a validation
        validation(X)
        model.load_state_dict(kept)
        validation.copyWeightsToDevice()
    trainer.detachFromDevice()
    nn.init.ones_(model.first.weight)
    trainer(X, Y)
    assert NOT_FOLLOWED not in caplog.text


class Taking(Net):
    def forward(
        self, x: torch.Tensor, y: torch.Tensor, factors: numpy.ndarray, extra: argparse.Namespace
    ) -> torch.Tensor:
        return super().forward(x * torch.tensor(factors) * extra.scale, y)


@pytest.mark.parametrize(
    "do, text",
    [
        (lambda factors, extra: factors.fill(3.0), "the array of argument 'factors'"),
        (lambda factors, extra: setattr(extra, "scale", 4.0), "scale of extra was 1.0 and is 4.0"),
    ],
)
def test_a_warning_names_a_constant_argument_that_changes(
    do: Callable[..., Any], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    factors, extra = numpy.ones(3, dtype=numpy.float32), argparse.Namespace(scale=1.0)
    executor, given = training(Taking()), (factors, extra)
    executor(X, Y, *given)
    do(*given)
    time.sleep(PAUSE)
    executor(X, Y, *given)
    assert text in caplog.text
