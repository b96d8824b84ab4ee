"""Constructors, attributes, copies, names of state; which may replace the compiled optimizer."""

import copy
import functools
import inspect
import itertools
import math
import pickle
import re

import pytest
import torch
from torch import nn

import poptorch
from helpers import plain_optimizers as plain
from helpers.closeness import FUNCTION, near
from helpers.wrapping import Graded, Having, compilations, options
from poptorch import optim
from poptorch.optim import arguments

ORDER = {
    optim.SGD: "params, lr, momentum, dampening, weight_decay, nesterov, maximize, foreach, "
    "differentiable, loss_scaling, velocity_scaling, use_combined_accum, accum_type, "
    "velocity_accum_type, max_grad_norm",
    optim.Adam: "params, lr, betas, eps, weight_decay, amsgrad, foreach, maximize, capturable, "
    "differentiable, fused, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, max_grad_norm",
    optim.AdamW: "params, lr, betas, eps, weight_decay, amsgrad, maximize, foreach, capturable, "
    "differentiable, fused, loss_scaling, bias_correction, accum_type, "
    "first_order_momentum_accum_type, second_order_momentum_accum_type, max_grad_norm",
    optim.RMSprop: "params, lr, alpha, eps, weight_decay, momentum, centered, foreach, maximize, "
    "differentiable, loss_scaling, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type, use_tf_variant",
    optim.LAMB: "params, lr, betas, eps, weight_decay, bias_correction, loss_scaling, "
    "max_weight_norm, accum_type, first_order_momentum_accum_type, "
    "second_order_momentum_accum_type",
}
F16 = torch.float16
OLD = {  # the positional order of the 1.x releases
    "SGD": ((0.1, 0.9, 0.0, 0.0, False, 128.0, None, True),
            {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True}),
    "Adam": ((0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, F16),
             {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-7, "accum_type": F16}),
    "AdamW": ((0.1, (0.8, 0.9), 1e-7, 0.1, False, 128.0, False),
              {"weight_decay": 0.1, "bias_correction": False}),
    "RMSprop": ((0.1, 0.9, 1e-7, 0.1, 0.5, True, 128.0, F16, None, None, True),
                {"lr": 0.1, "centered": True, "use_tf_variant": True}),
}  # fmt: skip


@pytest.fixture
def weight():
    return nn.Parameter(torch.tensor([1.0, -2.0]))


@pytest.mark.parametrize("cls", [optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.LAMB])
def test_order_bases_and_own_attributes(cls, weight):
    assert [*inspect.signature(cls).parameters] == ORDER[cls].split(", ")
    optimizer = cls([weight], lr=0.1)
    native = torch.optim.Optimizer if cls is optim.LAMB else getattr(torch.optim, cls.__name__)
    assert isinstance(optimizer, native)
    assert cls.__bases__[0] is optim.Optimizer
    assert optimizer.loss_scaling == 1.0
    assert optimizer.accum_type == torch.float32
    own = {*inspect.signature(cls).parameters} - {*inspect.signature(native).parameters}
    for name in own - {*inspect.signature(torch.optim.Adam).parameters, "velocity_scaling"}:
        assert hasattr(optimizer, name)
        assert name not in optimizer.param_groups[0] or name == "max_weight_norm"
    attributes = optimizer.variable_attrs
    for name in ("weight_decay", "loss_scaling"):
        attributes.markAsVariable(name)
        assert not attributes.isConstant(name)
        attributes.markAsConstant(name)
        assert attributes.isConstant(name)
    for mark in (attributes.markAsConstant, attributes.markAsVariable):
        with pytest.raises(AssertionError, match="Unknown attribute"):
            mark("velocity")
    for name in [n for n in own if n.endswith("accum_type")]:
        assert getattr(cls([weight], lr=0.1, **{name: F16}), name) == F16
        with pytest.raises(AssertionError, match="Accumulation types must be either"):
            cls([weight], lr=0.1, **{name: torch.bfloat16})


def test_defaults_are_constant_and_what_is_passed_is_variable(weight):
    adamw, lamb = optim.AdamW([weight]), optim.LAMB([weight])
    assert adamw.bias_correction is True
    assert adamw.max_grad_norm == float("inf")
    assert adamw.defaults["weight_decay"] == lamb.defaults["weight_decay"] == 0.01
    assert lamb.defaults["lr"] == 1e-3
    assert lamb.max_weight_norm == 65500.0
    rmsprop = optim.RMSprop([weight])
    assert rmsprop.defaults["alpha"] == 0.99
    assert rmsprop.use_tf_variant is False
    assert optim.Adam([("layer.weight", weight)]).param_groups[0]["param_names"] == ["layer.weight"]
    with pytest.raises(TypeError):
        optim.SGD([weight])
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        optim.SGD([weight], lr=0.1, nesterov=True)
    attributes = optim.Adam([weight], eps=1e-8, loss_scaling=1.0).variable_attrs
    assert isinstance(attributes, optim.VariableAttributes)
    names = ("eps", "loss_scaling", "lr", "betas")
    assert [attributes.isConstant(name) for name in names] == [False, False, True, True]
    attributes = optim.SGD([{"params": [weight], "weight_decay": 0.5}], 0.1).variable_attrs
    assert not attributes.isConstant("lr")
    assert attributes.isConstant("weight_decay")  # settings of groups stay constant


@pytest.mark.parametrize("name", OLD)
def test_the_order_of_1x_is_taken_and_said_once(name, weight, caplog, monkeypatch):
    args, wanted = OLD[name]
    monkeypatch.setattr(arguments, "_warned", set())
    for _ in range(2):
        optimizer = getattr(optim, name)([weight], *args)
    group = optimizer.param_groups[0]
    got = {key: group[key] if key in group else getattr(optimizer, key) for key in wanted}
    assert got == wanted
    assert optimizer.loss_scaling == 128.0
    assert group["maximize"] is False
    assert group["foreach"] is None
    assert not optimizer.variable_attrs.isConstant("loss_scaling")
    (record,) = caplog.records
    assert "128.0 is used as loss_scaling" in record.getMessage()
    caplog.clear()
    new = optim.SGD([weight], 0.1, 0.9, 0.0, 0.0, False, True, None, None, 2.0)
    assert new.param_groups[0]["maximize"] is True
    assert new.loss_scaling == 2.0
    assert not caplog.records
    with pytest.raises(TypeError, match="twice"):
        getattr(optim, name)([weight], *args, loss_scaling=2.0)


WRONG = [
    ("SGD", {"lr": "0.1"}, "Expected a number for lr"),
    ("Adam", {"maximize": 128.0}, "Expected a flag for maximize"),
    ("RMSprop", {"foreach": 128.0}, "Expected a flag for foreach"),
]


@pytest.mark.parametrize(("name", "settings", "message"), WRONG)
def test_a_value_of_the_wrong_type_is_an_error(name, settings, message, weight):
    with pytest.raises(AssertionError, match=message) as caught:
        getattr(optim, name)([weight], **settings)  # this line
    text, (key, value) = str(caught.value), list(settings.items())[-1]
    assert f"Got:    {name}(..., {key}={value!r})" in text
    assert re.search(r"Where:  test_classes.py:\d+, .*settings\) # this line\n", text)
    assert f"pass {'a number, such as 0.1' if 'number' in message else 'True or False'}" in text


def test_what_float32_cannot_hold_is_refused(weight):
    double = nn.Parameter(weight.detach().double())  # the device keeps them in float32 all the same
    for value in (1e308, -3.5e38, 10**39, 10**5000, torch.tensor(1e40, dtype=torch.float64)):
        with pytest.raises(ValueError, match="given for weight_decay is too large") as said:
            optim.LAMB([double], lr=0.1, weight_decay=value)
        assert "use a number between -3.4e+38 and 3.4e+38" in str(said.value)
    assert optim.SGD([double], lr=math.inf).param_groups[0]["lr"] == math.inf


@pytest.mark.spec("optimizers", 26)
@pytest.mark.parametrize("cls", [optim.AdamW, optim.LAMB])
def test_betas_from_configuration_files(cls, weight):
    assert cls([weight], betas=[0.8, 0.9]).param_groups[0]["betas"] == (0.8, 0.9)
    for wrong in (0.9, (0.9,), [0.9, 0.99, 0.999], "ab", (0.9, "0.99")):
        with pytest.raises(AssertionError, match="Expected a pair for betas"):
            cls([weight], betas=wrong)


@pytest.mark.spec("optimizers", 13)
def test_velocity_scaling_needs_the_combined_variant(weight, caplog):
    separate = optim.SGD([weight], lr=0.1, velocity_scaling=4.0)
    assert "value of velocity_scaling is ignored" in caplog.text
    assert "velocity_scaling" not in separate.param_groups[0]
    assert "velocity_scaling" not in separate.defaults
    caplog.clear()
    groups = [{"params": [weight], "velocity_scaling": 2.0}]
    combined = optim.SGD(groups, lr=0.1, velocity_scaling=4.0, use_combined_accum=True)
    assert not caplog.records
    assert combined.defaults["velocity_scaling"] == 4.0
    assert combined.param_groups[0]["velocity_scaling"] == 2.0


def test_native_lamb(weight):
    idle = nn.Parameter(torch.ones(1))
    for settings in ({"lr": 0.1, "max_weight_norm": 0.5}, {"bias_correction": False}):
        optimizer = optim.LAMB([weight, idle], **settings)
        want, state = {"w": weight.detach().double()}, {}
        for t in range(1, 9):
            gradient = torch.randn(2)
            weight.grad = gradient.clone()
            assert optimizer.step(lambda: 7) == 7
            want = plain.lamb(want, {"w": gradient.double()}, state, t, **settings)
        torch.testing.assert_close(weight.detach().double(), want["w"], **near(2 + FUNCTION, 8))
    assert idle.tolist() == [1.0]


def replicas_of(optimizer):
    yield copy.copy(optimizer)
    yield copy.deepcopy(optimizer)
    yield pickle.loads(pickle.dumps(optimizer))


@pytest.mark.spec("optimizers", 30)
def test_copies_keep_what_torch_does_not_know_and_must_upload_it(weight):
    scales = {"loss_scaling": 8.0, "velocity_scaling": 4.0, "use_combined_accum": True}
    optimizer = optim.SGD([weight], 0.1, **scales)
    optimizer.variable_attrs.markAsVariable("momentum")
    assert copy.copy(optimizer).param_groups[0]["params"][0] is weight
    for other in replicas_of(optimizer):
        assert {name: getattr(other, name) for name in scales} == scales
        assert other.param_groups[0]["velocity_scaling"] == 4.0
        assert not other.variable_attrs.isConstant("momentum")
        assert not other.has_state()
        assert not other.ipu_state_is_dirty
        other.param_groups[0]["lr"] = 0.5
        other.variable_attrs.markAsConstant("momentum")
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert not optimizer.variable_attrs.isConstant("momentum")
    optimizer.set_state_dict({"ipu_state": {"Accl1___w": torch.ones(2)}, "ipu_param": {}})
    optimizer.ipu_state_is_dirty = False
    for other in replicas_of(optimizer):
        assert other.ipu_state_is_dirty
        assert other.state_dict()["ipu_state"]["Accl1___w"].tolist() == [1, 1]


def compiled(cls, *args, **settings):
    """An optimizer of this class whose model is compiled for gradients of 1 and 2, the inputs."""
    model = Having(
        lambda m, x: poptorch.identity_loss((m.weight * x).sum(), "none"),
        weight=torch.nn.Parameter(torch.zeros(2)),
    )
    optimizer = cls(model.parameters(), *args, **settings)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped.compile(torch.tensor([1.0, 2.0]))
    return optimizer, wrapped


@pytest.mark.parametrize("name", ["LAMB", "RMSprop"])
def test_moment_types(name):
    optimizer, _ = compiled(
        getattr(optim, name),
        first_order_momentum_accum_type=F16,
        second_order_momentum_accum_type=torch.float32,
    )
    dtypes = {k: v.dtype for k, v in optimizer.state_dict()["ipu_state"].items() if v.dim()}
    adam_like = {"Accl1___weight": F16, "Accl2___weight": torch.float32}
    assert dtypes == ({"Accl1___weight": torch.float32} if name == "RMSprop" else adam_like)


def test_state_of_another_shape_and_weights_that_joined_later(caplog):
    optimizer, wrapped = compiled(optim.Adam, lr=0.1)
    saved = optimizer.state_dict()
    wrong = {**saved["ipu_state"], "Accl1___weight": torch.ones(3)}
    optimizer.load_state_dict({**saved, "ipu_state": wrong})
    with pytest.raises(RuntimeError, match="wrong shape"):
        wrapped(torch.ones(2))

    model = torch.nn.Linear(2, 1)
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(model, options(), optimizer, loss=torch.nn.MSELoss())
    wrapped(torch.ones(1, 2), torch.ones(1, 1))
    saved = optimizer.state_dict()
    saved["ipu_state"]["Step___weight"] += 3
    optimizer.load_state_dict(saved)
    wrapped(torch.ones(1, 2), torch.ones(1, 1))
    assert "fewer steps than others (bias: 1 instead of 4)" in caplog.text


EPS = pytest.approx(1e-8)
PARAMS = [
    (
        (optim.SGD, {"lr": 0.5, "dampening": 0.25, "weight_decay": 0.125, "loss_scaling": 4.0}),
        {
            "scaledLearningRate0": 0.5 * 0.75 / 4,
            "weightDecayScaleFactor0": 1 - 0.5 * 0.75 * 0.125,
            "lossScaling_FLOAT": 4.0,
        },
    ),
    (
        (optim.Adam, {"lr": 0.5, "betas": (0.25, 0.75), "eps": 0.125}),
        {
            "learningRate": 0.5,
            "weightDecay": 0.0,
            "adamBeta1": 0.25,
            "adamBeta2": 0.75,
            "adamEps": 0.125,
            "lossScaling_FLOAT": 1.0,
        },
    ),
    ((optim.LAMB, {"lr": 0.1, "max_weight_norm": 2.0}), {"maxWeightNorm": 2.0, "adamEps": EPS}),
    (
        (optim.RMSprop, {"lr": 0.1, "alpha": 0.75, "momentum": 0.5}),
        {"adaptiveAlpha": 0.75, "adaptiveMomentum": 0.5},
    ),
    (
        (optim.SGD, {"lr": 0.5, "momentum": 0.25, "loss_scaling": 2.0}),
        {"scaledLearningRate2": 0.25, "scaledMomentum2": 0.25},
    ),
    (
        (optim.SGD, {"lr": 0.5, "use_combined_accum": True, "velocity_scaling": 4.0}),
        {"scaledLearningRate1": 0.125},
    ),
]


def numbers(optimizer):
    shown = optimizer.state_dict()["ipu_param"]
    assert all(value.dtype == torch.float32 and not value.dim() for value in shown.values())
    return {name.removesuffix("___specific___weight"): float(v) for name, v in shown.items()}


@pytest.mark.parametrize(("made", "wanted"), PARAMS)
def test_parameters_have_documented_values_and_are_taken_over(made, wanted):
    """What was passed is variable, loaded values too, and reads back; the rest is constant."""
    cls, settings = made
    optimizer, _ = compiled(cls, **settings)
    found = numbers(optimizer)
    assert {name: found[name] for name in wanted} == wanted
    saved, half = optimizer.state_dict(), {**settings, "lr": settings["lr"] / 4}
    if "adamEps" in wanted and "eps" not in settings:
        saved["ipu_param"]["adamEps___specific___weight"] = torch.tensor(0.5)
    other, wrapped = compiled(cls, **half)
    assert numbers(other) != found
    other.load_state_dict(saved)
    wrapped(torch.ones(2))
    assert numbers(other) == found


@pytest.mark.parametrize("loaded", [torch.tensor(1e308, dtype=torch.float64), torch.ones(2)])
def test_a_loaded_number_that_float32_cannot_hold_is_refused(loaded):
    optimizer, wrapped = compiled(optim.SGD, lr=0.5, loss_scaling=2.0)
    saved = optimizer.state_dict()
    saved["ipu_param"]["lossScaling_FLOAT"] = loaded
    optimizer.load_state_dict(saved)
    with pytest.raises(poptorch.Error, match="loss_scaling"):
        wrapped(torch.ones(2))


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
CONSTANT = "constant but do not match"
BETAS = (
    r"'betas' of parameter group 0 is 0.5, but was 0.9 when the model was compiled"
    r"(?s:.*)markAsVariable\('betas'\)"
)
REFUSED = {  # what is compiled, what is set, what is said, and the error's class
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


def trained(make):
    model = Net()
    optimizer = make(model)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    wrapped(X, Y)
    return model, optimizer, wrapped


@pytest.fixture(scope="module")
def twice():
    """Makes what is trained with an optimizer, and its twin: once, as refusals change nothing."""
    return functools.cache(lambda make: (trained(make), trained(make)))


def everything(model, optimizer, _):
    state = {k: v for k, v in optimizer.state_dict().items() if k != "param_groups"}
    return {**model.state_dict(), "state": state}


@pytest.mark.spec("executor", 30)
@pytest.mark.spec("optimizers", 8, 16)
@pytest.mark.parametrize("name", REFUSED)
def test_set_optimizer_refuses_and_changes_nothing(name, twice):
    make, change, said, *kinds = REFUSED[name]
    subject, untouched = twice(make)
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
@pytest.mark.parametrize("base", [optim.SGD, optim.LAMB])
def test_subclasses_of_ours_are_warned_about_once(base, caplog):
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
    "half after half": (of(optim.SGD, lr=0.1, accum_type=F16),) * 2,
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
        "group attribute in SGD optimizer: colour, loss_scaling",
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


@pytest.mark.parametrize("scheduler", SCHEDULERS, ids=lambda each: each.__name__)
def test_schedulers_of_torch_that_come_after_wrapping_bring_nothing_unexpected(scheduler, caplog):
    _, optimizer, wrapped = trained(SGD)
    scheduler(optimizer, **REQUIRED.get(scheduler.__name__, {}))
    assert check(wrapped, optimizer, caplog) == []


def test_another_library_and_a_native_step_are_not_unexpected(caplog):
    model, native, wrapped = trained(of(torch.optim.AdamW))
    native.step()
    assert check(wrapped, native, caplog) == []
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}
    own = optim.AdamW(model.parameters(), bias_correction=True, **settings)
    assert check(wrapped, own, caplog) == []
