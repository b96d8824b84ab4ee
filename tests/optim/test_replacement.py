"""Which optimizer may replace the compiled one: refusals change nothing; attributes are watched."""

import copy
import functools
import itertools
import math

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Graded, compilations, options
from poptorch import optim

X, Y = torch.ones(4, 3), torch.arange(8.0).view(4, 2)


class Net(Graded):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(first=nn.Linear(3, 4), tanh=nn.Tanh(), second=nn.Linear(4, 2))


def of(cls, **settings):
    """What makes this optimizer for a model, of one group with settings of its own or without."""
    own = settings.pop("group", None)

    def make(model, _=None):
        parameters = [{"params": [*model.parameters()], **own}] if own else model.parameters()
        return cls(parameters, **settings)

    return make


def edited(edit):
    def change(_, optimizer):
        other = copy.copy(optimizer)
        edit(other)
        return other

    return change


ADAM, SGD = of(optim.Adam, lr=0.01), of(optim.SGD, lr=0.1)
ADAMW = of(optim.AdamW, lr=0.1)
HALF, CONSTANT = torch.float16, "constant but do not match"
BETAS = r"'betas' of parameter group 0 is 0.5; compiled: 0.9(?s:.*)markAsVariable\('betas'\)"
REFUSED = {  # what is compiled, what is set, what is said, and the error's class
    "type": (ADAM, SGD, "type of the optimizer"),
    "betas": (ADAM, of(optim.Adam, lr=0.01, group={"betas": (0.5, 0.999)}), BETAS),
    "becomes variable": (ADAM, edited(lambda o: o.variable_attrs.markAsVariable("weight_decay")),
                         "'weight_decay' of.*cannot become variable"),
    "becomes constant": (of(optim.SGD, lr=0.1, loss_scaling=1.0), SGD, "compiled as variable"),
    "clipping": (ADAM, of(optim.Adam, lr=0.01, max_grad_norm=1.0), "max_grad_norm"),
    "moments": (ADAM, of(optim.Adam, lr=0.01, first_order_momentum_accum_type=HALF),
                "first_order_momentum_accum_type"),
    "bias correction": (ADAMW, of(optim.AdamW, lr=0.1, bias_correction=False), CONSTANT),
    "a group more": (
        ADAM, edited(lambda o: o.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})),
        "number of parameter groups cannot change"),
    "members": (ADAM, lambda m, _: optim.Adam(m.first.parameters(), lr=0.01), "of a group cannot"),
    "unsupported": (ADAM, of(torch.optim.Adagrad), "Unsupported optimizer type", AssertionError),
    "no optimizer": (ADAM, lambda *_: "Adam", "Unsupported optimizer type", AssertionError),
    "amsgrad": (ADAM, of(optim.Adam, amsgrad=True), "Only non-amsgrad", ValueError),
    "half sums": (ADAM, of(optim.Adam, lr=0.01, accum_type=HALF), "needs MeanRed", ValueError),
    "no number": (ADAM, edited(lambda o: o.param_groups[0].update(lr="fast")),
                  "Expected a number for lr", AssertionError),
    **{
        f"too large, {kind.__module__}": (
            of(kind, lr=0.1),
            edited(lambda o: o.param_groups[0].update(lr=1e39)),
            r"given for lr is too large\n.*1e\+39",
        )
        for kind in (optim.SGD, torch.optim.SGD)
    },
}  # fmt: skip


def trained(make):
    model = Net()
    optimizer = make(model)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(X, Y)
    return model, optimizer, wrapped


@pytest.fixture(scope="module")
def compiled():
    """Makes what is trained with an optimizer, and its twin: once, as refusals change nothing."""
    return functools.cache(lambda make: (trained(make), trained(make)))


def everything(model, optimizer, _):
    state = {k: v for k, v in optimizer.state_dict().items() if k != "param_groups"}
    return {**model.state_dict(), "state": state}


@pytest.mark.spec("executor", 30)
@pytest.mark.spec("optimizers", 8, 16)
@pytest.mark.parametrize("name", REFUSED)
def test_set_optimizer_refuses_and_changes_nothing(name, compiled):
    make, change, said, *kinds = REFUSED[name]
    subject, untouched = compiled(make)
    model, optimizer, wrapped = subject
    with pytest.raises(poptorch.Error, match=said) as caught:
        wrapped.setOptimizer(change(model, optimizer))
    assert all(isinstance(caught.value, kind) for kind in kinds)
    torch.testing.assert_close(everything(*subject), everything(*untouched), rtol=0, atol=0)
    for *_, executor in (subject, untouched):  # it goes on with what was compiled
        executor(X, Y)
    torch.testing.assert_close(everything(*subject), everything(*untouched), rtol=0, atol=0)


def changed(make, **numbers):
    """What makes an optimizer that is edited before it is used."""

    def edit(model):
        optimizer = make(model)
        vars(optimizer).update(numbers)
        optimizer.param_groups[0].update(numbers)
        return optimizer

    return edit


def centered_in_one_group(model):
    first, *rest = model.parameters()
    return torch.optim.RMSprop([{"params": [first], "centered": True}, {"params": rest}])


COMBINED = {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}
SCALES = itertools.product(("loss_scaling", "velocity_scaling"), (0.0, -2.0, math.inf, math.nan))
TORCHS = of(torch.optim.SGD, lr=0.1)
UNFIT = [  # what is refused at once
    (changed(TORCHS, momentum=1e308), poptorch.Error, "given for momentum is too large"),
    (changed(TORCHS, lr="0.1"), AssertionError, "Expected a number for lr"),
    (REFUSED["unsupported"][1], AssertionError, "Unsupported optimizer type"),
    (REFUSED["amsgrad"][1], ValueError, "Only non-amsgrad"),
    (centered_in_one_group, AssertionError, "centered"),
    (changed(ADAM, use_tf_variant=True), ValueError, "variant"),
    (changed(ADAM, max_grad_norm=math.nan), poptorch.Error, "cannot be NaN"),
    (changed(ADAM, max_grad_norm=-1.0), ValueError, "cannot be negative"),
    (changed(of(optim.SGD, lr=0.1, momentum=0.9, nesterov=True), momentum=0.0), ValueError, "Nest"),
    *((of(optim.SGD, **COMBINED, **{s: v}), ValueError, f"{s} must be") for s, v in SCALES),
]


@pytest.mark.spec("optimizers", 27)
@pytest.mark.parametrize(("make", "error", "said"), UNFIT)
def test_wrapping_refuses_and_leaves_the_model_free(make, error, said):
    model = Net()
    with pytest.raises(error, match=said) as caught:
        poptorch.trainingModel(model, options(), make(model))  # that line
    assert isinstance(caught.value, poptorch.Error)
    assert "that line" in str(caught.value)
    assert type(model) is Net


@pytest.mark.spec("optimizers", 12)
@pytest.mark.parametrize("base", [torch.optim.SGD, optim.LAMB])
def test_subclasses_are_warned_about_once(base, caplog):
    class Mine(base):
        def step(self, closure=None):
            raise NotImplementedError

    _, optimizer, wrapped = trained(of(Mine, lr=0.1))
    wrapped.setOptimizer(optimizer)
    (record,) = caplog.records
    assert "Poptorch does not run Python optimizer code directly" in record.getMessage()
    assert "Mine" in record.getMessage()


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
    "half after half": (of(optim.SGD, lr=0.1, accum_type=torch.float16),) * 2,
}


@pytest.mark.spec("optimizers", 8, 9)
@pytest.mark.parametrize(("make", "change"), ALLOWED.values(), ids=ALLOWED)
def test_allowed_changes_cause_no_compile(make, change):
    model, optimizer, wrapped = trained(make)
    with compilations() as programs:
        wrapped.setOptimizer(change(model, optimizer))
        wrapped(X, Y)
    assert not programs


def check(wrapped, optimizer, caplog):
    """What setting it twice says."""
    caplog.clear()
    for _ in range(2):
        wrapped.setOptimizer(optimizer)
    return [r.getMessage().removeprefix("Ignoring unexpected ") for r in caplog.records]


@pytest.mark.spec("optimizers", 7, 11)
def test_new_attributes_are_one_warning_for_each_place_unless_checks_are_relaxed(caplog):
    _, optimizer, wrapped = trained(SGD)
    assert check(wrapped, optimizer, caplog) == []
    optimizer.mood = 1
    optimizer.defaults["size"] = 2
    optimizer.param_groups[0].update(colour=3, loss_scaling=4.0)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert check(wrapped, optimizer, caplog) == [
        "optimizer attribute in SGD optimizer: mood",
        "default group variable in SGD optimizer: size",
        "group attribute in SGD optimizer: colour, loss_scaling, initial_lr",
    ]
    assert optimizer.state_dict()["ipu_param"]["lossScaling_FLOAT"] == 1.0
    model = Net()
    optimizer = optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    assert check(wrapped, optimizer, caplog) == []  # they were there when it was wrapped
    model = Net()
    relaxed = poptorch.trainingModel(model, options().relaxOptimizerAttributesChecks(True))
    assert check(relaxed, changed(SGD, invented=1)(model), caplog) == []


def test_another_library_and_a_native_step_are_not_unexpected(caplog):
    model, native, wrapped = trained(of(torch.optim.AdamW))
    native.step()
    assert check(wrapped, native, caplog) == []
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    own = optim.AdamW(model.parameters(), bias_correction=True, **settings)
    assert check(wrapped, own, caplog) == []
