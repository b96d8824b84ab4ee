"""``setOptimizer``: which optimizers may replace the compiled one, and the errors for others."""

import copy
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import poptorch
from helpers.cases import slow_but_the_first
from helpers.wrapping import Graded, compilations, options
from poptorch import optim

F16 = torch.float16
X, Y = torch.ones(4, 3), torch.arange(8.0).view(4, 2)

Optimizer = torch.optim.Optimizer
Make = Callable[..., Any]
"""Makes an optimizer for a model, or changes that of a model."""


class Net(Graded):
    """Two layers, always with the same weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(first=nn.Linear(3, 4), tanh=nn.Tanh(), second=nn.Linear(4, 2))


def of(cls: type[Optimizer], **settings: Any) -> Make:
    """Return what makes this optimizer; ``group`` has settings of its one group."""
    own = settings.pop("group", None)

    def make(model: nn.Module, _: object = None) -> Optimizer:
        parameters = [{"params": [*model.parameters()], **own}] if own else model.parameters()
        return cls(parameters, **settings)

    return make


def edited(edit: Callable[[Any], object]) -> Make:
    """Return what makes an edited copy of a model's optimizer."""

    def change(_: nn.Module, optimizer: Optimizer) -> Optimizer:
        other = copy.copy(optimizer)
        edit(other)
        return other

    return change


def changed(make: Make, **numbers: Any) -> Make:
    """Return what makes an optimizer that is edited before it is used."""

    def edit(model: nn.Module) -> Optimizer:
        optimizer: Optimizer = make(model)
        vars(optimizer).update(numbers)
        optimizer.param_groups[0].update(numbers)
        return optimizer

    return edit


class Trained(NamedTuple):
    """A model that was trained for a step."""

    model: Net
    optimizer: Optimizer
    wrapped: poptorch.PoplarExecutor

    def everything(self) -> dict[str, Any]:
        """Return weights and the optimizer's state."""
        of_optimizer = self.optimizer.state_dict().items()
        state = {key: value for key, value in of_optimizer if key != "param_groups"}
        return {**self.model.state_dict(), "state": state}


def trained(make: Make) -> Trained:
    """Train the model for a step."""
    model = Net()
    optimizer = make(model)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(X, Y)
    return Trained(model, optimizer, wrapped)


ADAM, SGD = of(optim.Adam, lr=0.01), of(optim.SGD, lr=0.1)
ADAMW = of(optim.AdamW, lr=0.1)
CONSTANT = "compiled as constant has changed"
BETAS = (
    r"'betas' of parameter group 0 is 0.5, but was 0.9 when the model was compiled"
    r"(?s:.*)markAsVariable\('betas'\)"
)
# What is compiled, what is set, the message and the class of the error.
REFUSED: dict[str, tuple[Any, ...]] = {
    "type": (ADAM, SGD, "type of the optimizer"),
    "betas": (ADAM, of(optim.Adam, lr=0.01, group={"betas": (0.5, 0.999)}), BETAS),
    "becomes variable": (
        ADAM,
        edited(lambda o: o.variable_attrs.markAsVariable("weight_decay")),
        "'weight_decay' of.*cannot become variable",
    ),
    "becomes constant": (of(optim.SGD, lr=0.1, loss_scaling=1.0), SGD, "compiled as variable"),
    "clipping": (ADAM, of(optim.Adam, lr=0.01, max_grad_norm=1.0), "max_grad_norm"),
    "moments": (
        ADAM,
        of(optim.Adam, lr=0.01, first_order_momentum_accum_type=F16),
        "first_order_momentum_accum_type",
    ),
    "bias correction": (ADAMW, of(optim.AdamW, lr=0.1, bias_correction=False), CONSTANT),
    "a group more": (
        ADAM,
        edited(lambda o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})),
        "number of parameter groups cannot change",
    ),
    "members": (ADAM, lambda m, _: optim.Adam(m.first.parameters(), lr=0.01), "of a group cannot"),
    "unsupported": (ADAM, of(torch.optim.LBFGS), "Unsupported optimizer type", AssertionError),
    "no optimizer": (ADAM, lambda *_: "Adam", "Unsupported optimizer type", AssertionError),
    "amsgrad": (ADAM, of(optim.Adam, amsgrad=True), "Only non-amsgrad", ValueError),
    "half sums": (ADAM, of(optim.Adam, lr=0.01, accum_type=F16), "needs MeanRed", ValueError),
    "no number": (
        ADAM,
        edited(lambda o: o.param_groups[0].update(lr="fast")),
        "Expected a number for lr",
        AssertionError,
    ),
    **{
        f"too large, {kind.__module__}": (
            of(kind, lr=0.1),
            edited(lambda o: o.param_groups[0].update(lr=1e39)),
            r"given for lr is too large\n.*1e\+39",
        )
        for kind in (optim.SGD, torch.optim.SGD)
    },
}


@pytest.fixture(scope="module")
def with_copy() -> Callable[[Make], tuple[Trained, Trained]]:
    """Return the optimizers of a model and of its copy. Refusals change neither of them."""
    return functools.cache(lambda make: (trained(make), trained(make)))


@pytest.mark.spec("executor", 30)
@pytest.mark.spec("optimizers", 8, 16)
@pytest.mark.parametrize("name", REFUSED)
def test_an_optimizer_that_does_not_fit_the_program_is_refused(
    name: str, with_copy: Callable[[Make], tuple[Trained, Trained]]
) -> None:
    make, change, message, *kinds = REFUSED[name]
    subject, _ = with_copy(make)

    with pytest.raises(poptorch.Error, match=message) as refused:
        subject.wrapped.setOptimizer(change(subject.model, subject.optimizer))

    for kind in kinds:
        assert isinstance(refused.value, kind)


@pytest.mark.spec("executor", 30)
@pytest.mark.spec("optimizers", 8, 16)
@pytest.mark.parametrize("name", REFUSED)
def test_after_a_refused_optimizer_training_continues_unchanged(
    name: str, with_copy: Callable[[Make], tuple[Trained, Trained]]
) -> None:
    make, change, message, *_ = REFUSED[name]
    subject, untouched = with_copy(make)

    with pytest.raises(poptorch.Error, match=message):
        subject.wrapped.setOptimizer(change(subject.model, subject.optimizer))
    torch.testing.assert_close(subject.everything(), untouched.everything(), rtol=0, atol=0)

    for each in (subject, untouched):
        each.wrapped(X, Y)
    torch.testing.assert_close(subject.everything(), untouched.everything(), rtol=0, atol=0)


def centered_in_one_group(model: nn.Module) -> Optimizer:
    """Make an optimizer of two groups, which differ in a flag."""
    first, *rest = model.parameters()
    return optim.RMSprop([{"params": [first], "centered": True}, {"params": rest}], lr=0.01)


COMBINED = {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}
SCALES = itertools.product(("loss_scaling", "velocity_scaling"), (0.0, -2.0, math.inf, math.nan))
TORCHS = of(torch.optim.SGD, lr=0.1)
NESTEROV = of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)
# What makes an optimizer, the class of the error, and its message.
UNFIT: list[tuple[Make, type[Exception], str]] = [
    (changed(TORCHS, momentum=1e308), poptorch.Error, "given for momentum is too large"),
    (changed(TORCHS, lr="0.1"), AssertionError, "Expected a number for lr"),
    (REFUSED["unsupported"][1], AssertionError, "Unsupported optimizer type"),
    (REFUSED["amsgrad"][1], ValueError, "Only non-amsgrad"),
    (centered_in_one_group, AssertionError, "centered"),
    (changed(ADAM, use_tf_variant=True), ValueError, "variant"),
    (changed(ADAM, max_grad_norm=math.nan), poptorch.Error, "cannot be NaN"),
    (changed(ADAM, max_grad_norm=-1.0), ValueError, "cannot be negative"),
    (changed(NESTEROV, momentum=0.0), ValueError, "Nest"),
    *((of(optim.SGD, **COMBINED, **{s: v}), ValueError, f"{s} must be") for s, v in SCALES),
]


@pytest.mark.spec("optimizers", 27)
@pytest.mark.parametrize("make, error, message", UNFIT)
def test_wrapping_with_an_unfit_optimizer_is_refused_at_the_users_line(
    make: Make, error: type[Exception], message: str
) -> None:
    model = Net()

    with pytest.raises(error, match=message) as refused:
        poptorch.trainingModel(model, options(), make(model))  # that line

    assert isinstance(refused.value, poptorch.Error)
    assert "that line" in str(refused.value)


@pytest.mark.spec("optimizers", 27)
@pytest.mark.parametrize("make, error, message", UNFIT)
def test_a_model_stays_unwrapped_when_its_optimizer_is_refused(
    make: Make, error: type[Exception], message: str
) -> None:
    model = Net()

    with pytest.raises(error, match=message):
        poptorch.trainingModel(model, options(), make(model))

    assert type(model) is Net


@pytest.mark.spec("optimizers", 12)
@pytest.mark.parametrize("base", slow_but_the_first([optim.SGD, optim.LAMB]))
def test_one_warning_says_that_the_step_of_a_subclass_does_not_run(
    base: type[Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    class WithOwnStep(base):  # type: ignore[misc,valid-type]
        def step(self, closure: object = None) -> None:
            raise NotImplementedError

    subject = trained(of(WithOwnStep, lr=0.1))
    subject.wrapped.setOptimizer(subject.optimizer)

    (record,) = caplog.records
    assert "Poptorch does not run Python optimizer code directly" in record.getMessage()
    assert "WithOwnStep" in record.getMessage()


FEW = {"lr": 0.2, "betas": (0.1, 0.2), "loss_scaling": 2.0}
ALLOWED = {
    "a rate": (of(torch.optim.SGD, lr=0.1), of(torch.optim.SGD, lr=0.0)),
    "ours for torch's": (of(torch.optim.SGD, lr=0.1), of(optim.SGD, lr=0.3)),
    "torch's values": (
        of(torch.optim.RMSprop, momentum=0.1, weight_decay=0.1),
        of(torch.optim.RMSprop, lr=0.1, alpha=0.5, eps=1e-3, momentum=0.2, weight_decay=0.2),
    ),
    "torch's betas": (of(torch.optim.AdamW), of(torch.optim.AdamW, betas=(0.5, 0.6), eps=0.1)),
    "variables": (of(optim.Adam, **FEW), of(optim.Adam, lr=0.1, betas=(0.9, 0.99), loss_scaling=1)),
    "another order": (SGD, lambda model, _: optim.SGD([*model.parameters()][::-1], lr=0.2)),
    "half after half": (of(optim.SGD, lr=0.1, accum_type=F16),) * 2,
}


@pytest.mark.spec("optimizers", 8, 9)
@pytest.mark.parametrize("make, change", ALLOWED.values(), ids=ALLOWED)
def test_an_optimizer_with_other_numbers_causes_no_compilation(make: Make, change: Make) -> None:
    model, optimizer, wrapped = trained(make)

    with compilations() as programs:
        wrapped.setOptimizer(change(model, optimizer))
        wrapped(X, Y)

    assert not programs


# Attributes that nobody expects.


def warnings_of(
    wrapped: poptorch.PoplarExecutor, optimizer: Optimizer, caplog: pytest.LogCaptureFixture
) -> list[str]:
    """Return the warnings when an optimizer is set twice."""
    caplog.clear()
    for _ in range(2):
        wrapped.setOptimizer(optimizer)
    return [r.getMessage().removeprefix("Ignoring unexpected ") for r in caplog.records]


def with_new_attributes(optimizer: Optimizer) -> None:
    """Add attributes in three places, and a scheduler."""
    optimizer.invented = 1
    optimizer.defaults["size"] = 2
    optimizer.param_groups[0].update(colour=3, loss_scaling=4.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)


@pytest.mark.spec("optimizers", 7, 11)
def test_an_unchanged_optimizer_causes_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, wrapped = trained(SGD)

    assert warnings_of(wrapped, optimizer, caplog) == []


@pytest.mark.spec("optimizers", 7, 11)
def test_new_attributes_are_one_warning_for_each_place(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, wrapped = trained(SGD)

    with_new_attributes(optimizer)

    assert warnings_of(wrapped, optimizer, caplog) == [
        "optimizer attribute in SGD optimizer: invented",
        "default group variable in SGD optimizer: size",
        "group attribute in SGD optimizer: colour, loss_scaling",
    ]


def test_the_warning_about_a_new_attribute_names_the_class_of_the_optimizer(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    several = [torch.optim.Adam([parameter]) for parameter in model.parameters()]
    wrapped = poptorch.trainingModel(model, options(), several)

    several[0].invented = 1

    assert warnings_of(wrapped, several, caplog) == [
        "optimizer attribute in Adam optimizer: invented"
    ]


@pytest.mark.spec("optimizers", 7, 11)
def test_a_scale_that_is_new_in_a_group_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    _, optimizer, wrapped = trained(SGD)

    with_new_attributes(optimizer)
    wrapped.setOptimizer(optimizer)

    assert optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 1.0


@pytest.mark.spec("optimizers", 7, 11)
def test_attributes_that_were_there_when_the_model_was_wrapped_are_expected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    optimizer = optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)

    wrapped = poptorch.trainingModel(model, options(), optimizer)

    assert warnings_of(wrapped, optimizer, caplog) == []


@pytest.mark.spec("optimizers", 7, 11)
def test_new_attributes_cause_no_warning_when_checks_are_relaxed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Net()
    relaxed = poptorch.trainingModel(model, options().relaxOptimizerAttributesChecks(True))

    assert warnings_of(relaxed, changed(SGD, invented=1)(model), caplog) == []


REQUIRED = {  # what a scheduler of torch cannot be made without
    "LambdaLR": {"lr_lambda": lambda _: 1.0},
    "MultiplicativeLR": {"lr_lambda": lambda _: 1.0},
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [1]},
    "ExponentialLR": {"gamma": 0.9},
    "CosineAnnealingLR": {"T_max": 9},
    "CosineAnnealingWarmRestarts": {"T_0": 3},
    "CyclicLR": {"base_lr": 0.1, "max_lr": 0.2, "cycle_momentum": False},
    "OneCycleLR": {"max_lr": 0.2, "total_steps": 9, "cycle_momentum": False},
    "SWALR": {"swa_lr": 0.1},
}
SCHEDULERS = [
    each
    for each in (*vars(torch.optim.lr_scheduler).values(), torch.optim.swa_utils.SWALR)
    if isinstance(each, type)
    and issubclass(each, torch.optim.lr_scheduler.LRScheduler)
    and each.__name__ not in ("LRScheduler", "_LRScheduler", "ChainedScheduler", "SequentialLR")
]


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: each.__name__)
def test_schedulers_of_torch_that_are_created_after_wrapping_cause_no_warning(
    scheduler: Callable[..., object], caplog: pytest.LogCaptureFixture
) -> None:
    _, optimizer, wrapped = trained(SGD)

    scheduler(optimizer, **REQUIRED.get(scheduler.__name__, {}))

    assert warnings_of(wrapped, optimizer, caplog) == []


def test_a_native_step_is_not_unexpected(caplog: pytest.LogCaptureFixture) -> None:
    _, native, wrapped = trained(of(torch.optim.AdamW))

    native.step()

    assert warnings_of(wrapped, native, caplog) == []


def test_the_same_optimizer_of_another_library_is_not_unexpected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, _, wrapped = trained(of(torch.optim.AdamW))
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}

    own = optim.AdamW(model.parameters(), bias_correction=True, **settings)

    assert warnings_of(wrapped, own, caplog) == []
