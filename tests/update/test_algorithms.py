"""Updates against plain optimizers in float64; gradients of several runs; stochastic rounding."""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers import plain_optimizers as plain
from helpers.closeness import FUNCTION, near, relative
from helpers.wrapping import Having, options
from helpers.zoo import ZOO
from poptorch import MeanReductionStrategy, ReductionType
from poptorch._update.step import RandomRounding

STEPS = 8
HALF, TINY = torch.float16, 2.0**-26  # half of the smallest half number
STATE = {  # what users see of it: key of the plain implementation's state
    "SGD": {"Accl1": "v"},
    "RMSprop": {"Accl1": "v1", "Accl2": "v2", "Accl3": "v3"},
    **{name: {"Accl1": "m", "Accl2": "v"} for name in ("Adam", "AdamW", "LAMB")},
}
SGD = ("SGD", plain.sgd)
ADAM, ADAMW, LAMB = ("Adam", plain.adam), ("AdamW", plain.adamw), ("LAMB", plain.lamb)
RMSPROP = ("RMSprop", plain.rmsprop)
COMBINED = {"lr": 0.05, "momentum": 0.9, "use_combined_accum": True}
TF = {"lr": 0.01, "use_tf_variant": True}
MOMENTS = "Accl1 Accl2 Step"
# And the names of the state that users see. A constant of 0 is left out, one of 1 is not.
CASES = [
    (*SGD, {"lr": 0.1, "weight_decay": 1.0}, ""),
    (*SGD, {"lr": 0.1, "momentum": 0.9, "max_grad_norm": 0.3}, "Accl1"),
    (*SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}, "Accl1"),
    (*SGD, {"lr": 0.1, "momentum": 0.8, "dampening": 0.3, "maximize": True}, "Accl1 Step"),
    (*SGD, {**COMBINED, "weight_decay": 1.0}, "Accl Step"),
    (*SGD, {**COMBINED, "dampening": 0.3, "velocity_scaling": 4.0}, "Accl Step"),
    (*SGD, {**COMBINED, "nesterov": True, "weight_decay": 0.1}, "Accl Step"),
    (*ADAM, {}, MOMENTS),
    (*ADAM, {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.05}, MOMENTS),
    (*ADAM, {"lr": 0.01, "max_grad_norm": 0.1, "maximize": True}, MOMENTS),
    (*ADAMW, {"lr": 0.01, "betas": (0.0, 0.99), "weight_decay": 1.0}, MOMENTS),
    (*ADAMW, {"lr": 0.01, "bias_correction": False, "max_grad_norm": 1e3}, "Accl1 Accl2"),
    (*RMSPROP, {"lr": 0.01, "alpha": 0.9, "weight_decay": 0.01, "eps": 1e-6}, "Accl1"),
    (*RMSPROP, {"lr": 0.001, "momentum": 0.9, "centered": True, "eps": 1e-3}, "Accl1 Accl2 Accl3"),
    (*RMSPROP, TF, "Accl1"),
    (*RMSPROP, {**TF, "momentum": 0.5, "centered": True}, "Accl1 Accl2 Accl3"),
    (*LAMB, {"weight_decay": 1.0}, MOMENTS),
    (*LAMB, {"lr": 0.01, "betas": (0.8, 0.99), "max_weight_norm": 0.5}, MOMENTS),
    (*LAMB, {"lr": 0.01, "weight_decay": 0.0, "bias_correction": False}, "Accl1 Accl2"),
]
NETS = ["transformer", "linear", "conv_batchnorm", "linear", "linear"]
OURS = {"max_grad_norm", "use_combined_accum", "bias_correction", "use_tf_variant"}


def all_cases() -> Iterator[Any]:
    """All with constants; with variables what torch has not, in which eager ones are variable."""
    for name, function, settings, state_names in CASES:
        yield name, function, settings, state_names, True
        if name == "LAMB" or OURS & settings.keys():
            yield name, function, settings, state_names, False


def make(name: str, model: Having, settings: dict[str, float], constant: bool) -> torch.optim.SGD:
    """An optimizer of two groups, whose attributes are all constants or all variables."""
    first, *rest = model.parameters()
    groups = [{"params": [first]}, {"params": rest}]
    optimizer = getattr(poptorch.optim, name)(groups, **settings)
    mark = optimizer.variable_attrs
    for attribute in (*optimizer.defaults, "loss_scaling"):
        (mark.markAsConstant if constant else mark.markAsVariable)(attribute)
    optimizer.loss_scaling = 2.0**10  # which changes nothing in float32
    return optimizer


def plain_update(function: Callable[..., Any], settings: dict[str, float]) -> Callable[..., Any]:
    """The plain form of one update, with what is common to several optimizers."""
    unknown = ("maximize", "use_combined_accum", "velocity_scaling")  # the last changes no number
    own = {k: v for k, v in settings.items() if k not in unknown}
    limit, sign = own.pop("max_grad_norm", float("inf")), -1 if "maximize" in settings else 1

    def update(
        weights: dict[str, torch.Tensor],
        gradients: dict[str, torch.Tensor],
        state: dict[str, Any],
        step: int,
    ) -> dict[str, torch.Tensor]:
        if limit < float("inf"):
            gradients = plain.clipped(gradients, limit)
        gradients = {name: sign * gradient for name, gradient in gradients.items()}
        return function(weights, gradients, state, step, **own)

    return update


def close(what: str, got: torch.Tensor, expected_value: torch.Tensor, factor: float = 1.0) -> None:
    scale = float(expected_value.abs().max())
    torch.testing.assert_close(
        got.double(),
        expected_value,
        **near(16, STEPS, size=factor * scale / 10),
        msg=lambda differences: f"{what}\n{differences}",
    )


@pytest.mark.spec("optimizers", 5, 6, 24)
@pytest.mark.parametrize(
    ("name", "function", "settings", "state_names", "constant", "net"),
    [
        pytest.param(*case, net, marks=[] if case[-1] else pytest.mark.slow)
        for case, net in zip(all_cases(), itertools.cycle(NETS), strict=False)
    ],
)
def test_each_optimizer_equals_its_plain_form_in_float64(
    name: str,
    function: Callable[..., Any],
    settings: dict[str, float | tuple[float, float]],
    state_names: str,
    constant: bool,
    net: str,
) -> None:
    """The plain form follows the executor's own gradients."""
    torch.manual_seed(0)
    model, batch, opts = ZOO[net].build(), ZOO[net].inputs(32), options()
    paths = [path for path, _ in model.named_parameters()]
    for path in paths:
        opts.anchorTensor(path, f"Gradient___{path}")
    optimizer = make(name, model, settings, constant)
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    weights = {path: p.detach().double() for path, p in model.named_parameters()}
    state, update, scale = {}, plain_update(function, settings), optimizer.loss_scaling
    combined = "use_combined_accum" in settings
    for step in range(1, STEPS + 1):
        wrapped(*batch)
        gradients = {path: wrapped.getAnchoredTensor(path).double() / scale for path in paths}
        weights = update(weights, gradients, state, step)
        if step in (1, STEPS):
            when = f"after {step} of {STEPS} updates"
            found = optimizer.state_dict()["ipu_state"]
            for prefix, key in () if combined else STATE[name].items():
                for path in (path for path in paths if key in state.get(path, ())):
                    what = f"{prefix} of {path} {when}"
                    close(what, found[f"{prefix}___{path}"], state[path][key], factor=10)
            for path, weight in model.named_parameters():
                what = f"weight {path} {when}, with state that is right"
                close(what, weight.detach(), weights[path], factor=5 if combined else 1)
    if constant:  # what is variable may need more
        assert {key.split("___")[0] for key in found} == {*state_names.split()}


def stepped(
    name: str,
    settings: dict[str, bool],
    start: float,
    gradients: list[float],
    dtype: torch.dtype = torch.float32,
    library: Any = poptorch.optim,
) -> tuple[float, dict[str, float]]:
    """The weight, and the device's state, after updates with gradients that are given."""
    model = Having(
        lambda m, x: poptorch.identity_loss((m.weight.float() * x).sum(), "none"),
        weight=nn.Parameter(torch.full((1,), start, dtype=dtype)),
    )
    optimizer = getattr(library, name)(model.parameters(), **settings)
    wrapped = poptorch.trainingModel(model, options(), optimizer)
    for gradient in gradients:
        wrapped(torch.tensor([gradient]))
    state = optimizer.state_dict().get("ipu_state", {})
    return float(model.weight.detach()), {k.split("___")[0]: float(v) for k, v in state.items()}


PLAIN_LAMB = {"lr": 0.1, "bias_correction": False, "weight_decay": 0.0}
UNCORRECTED = pytest.approx(-0.1 * 0.1 / 0.001**0.5, rel=relative(8))
PRECISE = {"Accl2": pytest.approx(0.001, rel=relative(1))}
NESTEROV = {"lr": 1.0, "momentum": 0.5, "nesterov": True, "velocity_accum_type": HALF}
DAMPENED = {"lr": 0.5, "dampening": 0.75, "weight_decay": 2.0}
BY_HAND = {
    "TensorFlow's variant": (("RMSprop", {"use_tf_variant": True}, 1.0, [0.5]),
                             (pytest.approx(1 - 0.01 * 0.5 / (0.99 + 0.01 * 0.25) ** 0.5), {})),
    "LAMB trusts the update of a zero weight": (
        ("LAMB", {"lr": 0.1}, 0.0, [1.0]), (pytest.approx(-0.1), {})),
    "LAMB takes a zero update": (("LAMB", {"lr": 0.1}, 0.0, [0.0]), (0.0, {})),
    "of any weight": (("LAMB", {"lr": 0.1, "weight_decay": 0.0}, 1.0, [0.0]), (1.0, {})),
    "1 - 0.999 in float32 is off by 5e-5": (
        ("LAMB", PLAIN_LAMB, 0.0, [1.0]), (UNCORRECTED, PRECISE)),
    "of a variable, too": (("LAMB", {**PLAIN_LAMB, "betas": (0.9, 0.999)}, 0.0, [1.0]),
                           (UNCORRECTED, PRECISE)),
    "the first gradient is not dampened": (
        ("SGD", {"lr": 1.0, "momentum": 0.5, "dampening": 0.75}, 0.0, [1.0, 1.0]),
        (-1.75, {"Accl1": 0.75})),
    "half weights are updated in single precision": (
        ("SGD", {"lr": 2.0**15, "loss_scaling": 2.0**8}, 1.0, [TINY], HALF), (1 - 2.0**-11, {})),
    "a half velocity loses what is tiny": (
        ("SGD", NESTEROV, 0.0, [TINY, TINY]), (-TINY * (1.5 + 1.5), {"Accl1": 0.0})),
    "a half velocity is scaled like the gradients": (
        ("SGD", {**NESTEROV, "loss_scaling": 1024.0}, 0.0, [TINY, TINY]),
        (-TINY * (1.5 + 1.75), {"Accl1": 1024 * 1.5 * TINY})),
    "dampening without momentum scales the rate": (
        ("SGD", DAMPENED, 1.0, [4.0]), (1 - 0.125 * 2 - 0.125 * 4, {})),
    "moments of half weights are float, where second ones would vanish": (
        ("Adam", {"lr": 0.125}, 1.0, [2.0**-10, 2.0**-10], HALF, torch.optim), (0.75, {})),
    "but not torch's": (("SGD", DAMPENED, 1.0, [4.0], torch.float32, torch.optim),
                        (1 - 0.5 * 2 - 0.5 * 4, {})),
}  # fmt: skip


@pytest.mark.spec("optimizers", 24, 25, 28)
@pytest.mark.parametrize("case", BY_HAND)
def test_updates_equal_those_computed_by_hand(case: str) -> None:
    given, (weight, state) = BY_HAND[case]
    got, found = stepped(*given)
    assert got == weight
    assert {key: found[key] for key in state} == state


COUNT = 1 << 16
VALUES = [1.0 + 2.0**-12, -3.3, 1000.1, 2.0**-15 * 1.0001, -(2.0**-25), 6.0e-8, 0.1]


def store(
    values: torch.Tensor, counter: int = 0, dtype: torch.dtype = torch.float16
) -> torch.Tensor:
    return RandomRounding(torch.tensor(counter))(values, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_rounding_is_unbiased_between_the_two_neighbours(dtype: torch.dtype) -> None:
    for value in torch.tensor(VALUES):
        got = store(value.expand(COUNT), dtype=dtype).double()
        found, value = got.unique(), float(value)
        assert len(found) <= 2
        assert float(found.min()) <= value <= float(found.max())
        # 5 standard deviations of the mean of COUNT coins that land one step apart
        step = float(found.max() - found.min())
        assert abs(float(got.mean()) - value) <= 5 * 0.5 * step / COUNT**0.5 + 1e-12
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    exact = every[~every.isnan()]  # what is representable stays
    assert torch.equal(store(exact.float(), dtype=dtype), exact)
    assert store(torch.tensor([float("nan")]), dtype=dtype).isnan().all()


def test_random_rounding_draws_a_reproducible_stream() -> None:
    values, stores = torch.full((COUNT,), 1 + 2.0**-11), RandomRounding(torch.tensor(7))
    first, second = stores(values, torch.float16), stores(values, torch.float16)
    repeated, later = store(values, 7), store(values, 8)
    assert torch.equal(first, repeated)
    drawn = [1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1]  # by every version of poptorch
    assert list(map(int, first[:16] > 1)) == drawn
    for other in (second, later):
        share = float((first == other).double().mean())
        assert 0.48 < share < 0.52  # independent coins agree half of the time
    up = (first > 1).double()
    assert abs(float((up[1:] * up[:-1]).mean()) - 0.25) < 0.01  # so do neighbours


OPTIMIZERS = {
    "SGD momentum": {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01},
    "SGD combined": {"lr": 0.1, "momentum": 0.9, "use_combined_accum": True},
    "Adam": {"lr": 0.01, "max_grad_norm": 0.1},
    "RMSprop": {"lr": 0.01, "centered": True},
    "LAMB": {"lr": 0.01},
}
MODES = [
    *((ReductionType.Mean, strategy) for strategy in MeanReductionStrategy),
    (ReductionType.Sum, MeanReductionStrategy.Post),
]


def trained(
    name: str, opts: poptorch.Options, reduction: str, scale: float = 1.0
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers, loss = (
        (nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)),
        nn.CrossEntropyLoss(reduction=reduction),
    )
    model = Having(lambda m, x, labels: loss(m.model(x), labels), model=nn.Sequential(*layers))
    inputs = torch.randn(32, 6)
    optimizer = getattr(poptorch.optim, name.split()[0])(model.parameters(), **OPTIMIZERS[name])
    optimizer.variable_attrs.markAsConstant("loss_scaling")
    optimizer.loss_scaling = scale
    wrapped = poptorch.trainingModel(model, opts, optimizer)
    for _ in range(3):
        wrapped(inputs, torch.arange(32) % 3)
    return {path: p.detach().clone() for path, p in model.named_parameters()}


@functools.cache
def whole(name: str, reduction: str) -> dict[str, torch.Tensor]:
    """Return the weights after an update with one batch of 32."""
    return trained(name, options(), reduction)


def equals_one_batch(
    name: str, mode: tuple[ReductionType, MeanReductionStrategy], opts: poptorch.Options
) -> None:
    kind, strategy = mode
    reduction = "mean" if kind is ReductionType.Mean else "sum"
    opts.Training.accumulationAndReplicationReductionType(kind)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
    got = trained(name, opts, reduction, scale=2.0**10)
    for path, value in whole(name, reduction).items():
        torch.testing.assert_close(got[path], value, **near(32 + FUNCTION, 3, size=0.1))


@pytest.mark.spec("optimizers", 21)
@pytest.mark.parametrize(
    "name, mode, lanes",
    [
        *(("SGD combined", mode, 1) for mode in range(4)),  # adds gradients to its velocity
        *(("Adam", mode, mode % 2) for mode in range(4)),  # clips; 0: side by side
        ("SGD combined", 1, 0),
        ("RMSprop", 2, 0),
        ("LAMB", 3, 0),
    ],
)
def test_eight_micro_batches_of_four_equal_one_of_32(name: str, mode: int, lanes: int) -> None:
    equals_one_batch(name, MODES[mode], options(accumulation=8).lanes(lanes))


@pytest.mark.spec("optimizers", 21)
@pytest.mark.spec("parallel", 31)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("backend", "lanes", "replicas"), [("reference", 1, 4), ("reference", 0, 2), ("staged", 0, 2)]
)
def test_replicas_and_accumulation_together_equal_one_batch(
    backend: str, lanes: int, replicas: int, mode: tuple[ReductionType, MeanReductionStrategy]
) -> None:
    """The optimizer's steps are proportional to its gradients."""
    opts = options(backend, accumulation=8 // replicas, replicas=replicas).lanes(lanes)
    equals_one_batch("SGD momentum", mode, opts)
