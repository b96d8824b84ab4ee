"""Updates that are traced from an optimizer's own ``step``, next to the same optimizer in eager."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from transformers.optimization import Adafactor as TransformersAdafactor

import poptorch
from helpers import exported
from helpers import own_optimizers as own
from helpers.closeness import FUNCTION, near, relative
from helpers.wrapping import Having, options

STEPS, ROWS = 20, 24  # rows: micro-batches of 4, accumulation 3, replicas 2
COUNTS = {"accumulation": 3, "replicas": 2}
ROUNDINGS = ROWS + 6 * FUNCTION


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x, labels):
        scores = self.last(torch.tanh(self.first(x)))
        return scores, nn.functional.cross_entropy(scores, labels)


def of(cls, **settings):
    """What makes an optimizer of two groups."""

    def make(model):
        first, rest = [*model.parameters()][:2], [*model.parameters()][2:]
        return cls([{"params": first}, {"params": rest, "lr": 0.02}], **settings)

    return make


def matrices_only(model):
    return torch.optim.Muon([{"params": [model.first.weight]},
                             {"params": [model.last.weight], "lr": 0.02}], lr=0.01)  # fmt: skip


def by_itself(model):
    """It takes no rate: it makes one from the number of the step and the size of the weight."""
    return TransformersAdafactor(model.parameters(), warmup_init=True)


def of_transformers(model):
    settings = {"lr": 0.01, "relative_step": False, "scale_parameter": False}
    return TransformersAdafactor(model.parameters(), **settings)


T = torch.optim
CASES = {
    "Adadelta": of(T.Adadelta),
    "Adafactor": of(T.Adafactor, lr=0.01),
    "Adagrad": of(T.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam, amsgrad": of(T.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "Adam, tensors": of(
        T.Adam, lr=torch.tensor(0.01), betas=(torch.tensor(0.8), torch.tensor(0.99))
    ),
    "AdamW, amsgrad": of(T.AdamW, lr=torch.tensor(0.01), amsgrad=True, maximize=True),
    "Adamax": of(T.Adamax, lr=0.01, weight_decay=0.1),
    "ASGD": of(T.ASGD, lr=0.01, t0=5.0, lambd=0.01),
    "Muon": matrices_only,
    "NAdam": of(T.NAdam, lr=0.01, foreach=True, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": of(T.RAdam, lr=0.01),
    "RMSprop": of(T.RMSprop, lr=0.01, momentum=0.9),
    "Rprop": of(T.Rprop, lr=0.01),
    "SGD": of(T.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "Adafactor of transformers": of_transformers,
    "Adafactor of transformers by itself": by_itself,
    "Lion": of(own.Lion, lr=0.01, weight_decay=0.1),
    "LARS": of(own.LARS, lr=0.1),
    "ScheduledAdam": of(own.ScheduledAdam, lr=0.01),
    "Lookahead": of(own.Lookahead, momentum=0.9),
    "CountingGroups": of(own.CountingGroups, lr=0.1),
    "OneNorm": of(own.OneNorm),
    "Nested": of(own.Nested, lr=0.01),
}


class Pair:
    """A model that is trained by a program, and its twin, which eager torch trains."""

    def __init__(self, make, backend="reference", kind=Net):
        torch.manual_seed(0)
        # Muon computes in bfloat16: five products one after another, and then steps of 0.02.
        halves = {"rtol": 0, "atol": 0.02 * relative(5, STEPS, torch.bfloat16)}
        self.bounds = halves if make is matrices_only else near(ROUNDINGS, STEPS)
        self.model = kind()
        self.twin = copy.deepcopy(self.model)
        self.optimizer, self.twins = make(self.model), make(self.twin)
        self.training = wrapped(self.model, self.optimizer, backend)
        self._generator = torch.Generator().manual_seed(1)

    def batch(self):
        x = torch.randn(ROWS, 6, generator=self._generator)
        return x, torch.randint(3, (ROWS,), generator=self._generator)

    def step(self, *others):
        batch = self.batch()
        self.training(*batch)
        step_eagerly(self.twin, self.twins, batch)
        for other in others:
            other(batch)

    def assert_alike(self, model=None):
        got = (self.model if model is None else model).state_dict()
        torch.testing.assert_close(got, self.twin.state_dict(), **self.bounds)


def wrapped(model, optimizer, backend="reference"):
    return poptorch.trainingModel(model, options(backend, **COUNTS), optimizer)


def step_eagerly(model, optimizer, batch):
    optimizer.zero_grad()
    model(*batch)[1].backward()
    optimizer.step()


def state_of(optimizer):
    return copy.deepcopy(optimizer.state_dict())


def scheduled(optimizer):
    """A schedule, if the optimizer takes a rate."""
    if any(group["lr"] is None for group in optimizer.param_groups):
        return None
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_twenty_steps_with_a_schedule_are_those_of_eager_torch(name, backend):
    pair = Pair(CASES[name], backend)
    schedules = [scheduled(each) for each in (pair.optimizer, pair.twins)]
    for _ in range(STEPS):
        pair.step()
        for schedule in filter(None, schedules):
            schedule.step()
        pair.training.setOptimizer(pair.optimizer)
    pair.assert_alike()


@pytest.mark.parametrize("name", CASES)
def test_state_has_the_entries_types_and_values_of_eager_torch(name):
    pair = Pair(CASES[name])
    for _ in range(3):
        pair.step()
    got, want = state_of(pair.optimizer), state_of(pair.twins)
    assert _kinds(got["state"]) == _kinds(want["state"])
    torch.testing.assert_close(got["state"], want["state"], **pair.bounds)


def _kinds(value):
    if isinstance(value, dict):
        return {key: _kinds(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_kinds(each) for each in value]
    return type(value)


RESUMED = [name for name in CASES if name != "Lookahead"]  # its count is in no state_dict()


@pytest.mark.parametrize("name", RESUMED)
def test_eager_torch_continues_from_the_state_of_a_program(name):
    pair = Pair(CASES[name])
    for _ in range(4):
        pair.step()
    resumed = copy.deepcopy(pair.model)
    optimizer = CASES[name](resumed)
    optimizer.load_state_dict(state_of(pair.optimizer))
    for _ in range(4):
        pair.step(lambda batch: step_eagerly(resumed, optimizer, batch))
    pair.assert_alike(resumed)


@pytest.mark.parametrize("name", RESUMED)
def test_a_program_continues_from_the_state_of_eager_torch(name):
    pair = Pair(CASES[name])
    for _ in range(4):
        pair.step()
    resumed = Net()
    resumed.load_state_dict(pair.twin.state_dict())
    optimizer = CASES[name](resumed)
    optimizer.load_state_dict(state_of(pair.twins))
    training = wrapped(resumed, optimizer)
    for _ in range(4):
        pair.step(lambda batch: training(*batch))
    pair.assert_alike(resumed)


@pytest.mark.parametrize("name", RESUMED)
def test_state_that_is_loaded_into_a_running_program_takes_effect(name):
    pair = Pair(CASES[name])
    for _ in range(4):
        pair.step()
    other = Pair(CASES[name])
    other.step()
    other.model.load_state_dict(pair.twin.state_dict())
    other.training.copyWeightsToDevice()
    other.optimizer.load_state_dict(state_of(pair.twins))
    for _ in range(4):
        pair.step(lambda batch: other.training(*batch))
    pair.assert_alike(other.model)


@pytest.mark.parametrize("name", ["LARS", "ScheduledAdam", "NAdam"])
def test_device_iterations_are_steps_one_after_another(name):
    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    optimizer, twins = CASES[name](model), CASES[name](twin)
    training = poptorch.trainingModel(model, options(iterations=4), optimizer)
    x, labels = torch.randn(16, 6), torch.randint(3, (16,))
    training(x, labels)
    for part in zip(x.chunk(4), labels.chunk(4), strict=True):
        step_eagerly(twin, twins, part)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **near(ROUNDINGS, 4))


def test_counters_of_a_step_in_groups_are_current_after_a_call():
    pair = Pair(CASES["CountingGroups"])
    for _ in range(3):
        pair.step()
    assert [group["step"] for group in pair.optimizer.param_groups] == [3, 3]


def test_counters_of_a_step_in_the_optimizer_are_current_after_a_call():
    pair = Pair(CASES["Lookahead"])
    for _ in range(3):
        pair.step()
    assert pair.optimizer.count == 3


EVERYWHERE = ["LARS", "ScheduledAdam", "CountingGroups", "NAdam", "Adagrad"]


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_saved_program_continues_with_the_state_of_its_optimizer(name, tmp_path):
    pair = Pair(CASES[name])
    for _ in range(3):
        pair.step()
    pair.training.save(tmp_path / "model.poptorch")
    model = Net()
    optimizer = CASES[name](model)
    loaded = poptorch.load(tmp_path / "model.poptorch", model=model, optimizer=optimizer)
    for _ in range(3):
        pair.step(lambda batch: loaded(*batch))
    torch.testing.assert_close(model.state_dict(), pair.model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_checkpoint_has_the_state_of_a_traced_optimizer(name, tmp_path):
    pair, resumed = Pair(CASES[name]), Pair(CASES[name])
    batches = [pair.batch() for _ in range(4)]
    checkpoints = poptorch.Checkpoints(tmp_path, pair.training, batches)
    for number, batch in enumerate(checkpoints.batches(1), 1):
        pair.training(*batch)
        if number == 2:
            checkpoints.save()
    again = poptorch.Checkpoints(tmp_path, resumed.training, batches)
    assert again.resume()
    for batch in again.batches(1):
        resumed.training(*batch)
    got, want = resumed.model.state_dict(), pair.model.state_dict()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERYWHERE)
def test_a_traced_optimizer_survives_detaching_and_destroying(name):
    pair = Pair(CASES[name])
    pair.step()
    pair.training.detachFromDevice()
    pair.training.attachToDevice()
    pair.step()
    pair.training.destroy()
    pair.training = wrapped(pair.model, pair.optimizer)
    pair.step()
    pair.assert_alike()


@pytest.mark.parametrize("name", EVERYWHERE)
def test_an_exported_update_computes_what_the_program_does(name, tmp_path):
    pair = Pair(CASES[name])
    batch = pair.batch()
    pair.training.compile(*batch)
    pair.training.export(tmp_path / "step.py")
    module = exported.loaded(tmp_path / "step.py")
    (weights, *state), given = module.load(tmp_path / "step.safetensors")
    pair.training(*given)
    module.step(weights, *state, *given)
    for path, weight in pair.model.named_parameters():
        torch.testing.assert_close(weights[path], weight.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["LARS", "Adafactor", "CountingGroups", "OneNorm"])
def test_stages_on_several_chips_step_like_eager_torch(name):
    class InBlocks(Net):
        def forward(self, x, labels):
            with poptorch.Block("first", ipu_id=0):
                hidden = torch.tanh(self.first(x))
            with poptorch.Block("last", ipu_id=1):
                scores = self.last(hidden)
                return scores, nn.functional.cross_entropy(scores, labels)

    pair = Pair(CASES[name], "staged", InBlocks)
    for _ in range(3):
        pair.step()
    pair.assert_alike()


def program_of(pair):
    return pair.training._session.now.compiled


@pytest.mark.parametrize("change", [{"lr": 0.5}, {"betas": (0.5, 0.6)}, {"weight_decay": 0.3}])
def test_numbers_that_the_code_computes_with_change_without_another_program(change):
    pair = Pair(CASES["Lion"])
    pair.step()
    before = program_of(pair)
    for optimizer in (pair.optimizer, pair.twins):
        optimizer.param_groups[0].update(change)
    pair.training.setOptimizer(pair.optimizer)
    pair.step()
    assert program_of(pair) is before
    pair.assert_alike()


def test_a_number_that_decides_what_the_code_does_makes_another_program_when_it_changes():
    pair = Pair(of(T.Adamax, lr=0.01))
    pair.step()
    before = program_of(pair)
    for optimizer in (pair.optimizer, pair.twins):
        optimizer.param_groups[1]["weight_decay"] = 0.5
    pair.training.setOptimizer(pair.optimizer)
    pair.step()
    assert program_of(pair) is not before
    pair.assert_alike()


def test_several_optimizers_of_a_class_each_step_their_groups():
    def both(model):
        return [T.NAdam(model.first.parameters(), lr=0.01),
                T.NAdam(model.last.parameters(), lr=0.02)]  # fmt: skip

    torch.manual_seed(0)
    model = Net()
    twin = copy.deepcopy(model)
    training = wrapped(model, both(model))
    twins = both(twin)
    x, labels = torch.randn(ROWS, 6), torch.randint(3, (ROWS,))
    for _ in range(3):
        training(x, labels)
        twin.zero_grad()
        twin(x, labels)[1].backward()
        for each in twins:
            each.step()
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), **near(ROUNDINGS, 3))


def test_gradients_are_clipped_before_a_traced_step():
    def clipping(model):
        optimizer = of(T.NAdam, lr=0.01)(model)
        optimizer.max_grad_norm = 0.05
        return optimizer

    pair = Pair(clipping)
    for _ in range(3):
        batch = pair.batch()
        pair.training(*batch)
        pair.twin.zero_grad()
        pair.twin(*batch)[1].backward()
        nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.05)
        pair.twins.step()
    pair.assert_alike()


class Weird(torch.optim.Optimizer):
    """Does to each weight what a function says."""

    def __init__(self, params, function, **defaults):
        super().__init__(params, {"lr": 0.1, **defaults})
        self.function = function

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.function(p, group, self.state[p])  # that line


def weird(function, **defaults):
    def make(model):
        return Weird(model.parameters(), function, **defaults)

    return make


def refused(make):
    pair = Pair(make)
    with pytest.raises(poptorch.Error) as caught:
        pair.training(*pair.batch())
    return str(caught.value)


def test_a_value_that_only_the_device_has_is_refused_with_its_line():
    said = refused(weird(lambda p, group, state: p.mul_(float(p.norm()))))
    assert "test_own_steps.py" in said
    assert "float()" in said


def test_a_result_whose_size_depends_on_values_is_refused_with_its_line():
    said = refused(weird(lambda p, group, state: p[p > 0].mul_(0.5)))
    assert "test_own_steps.py" in said
    assert "size" in said


def test_random_numbers_in_a_step_are_refused_with_their_line():
    said = refused(weird(lambda p, group, state: p.add_(torch.randn_like(p))))
    assert "draws random numbers" in said
    assert "test_own_steps.py" in said


def test_state_that_belongs_to_no_parameter_is_refused():
    class Keeping(Weird):
        def step(self, closure=None):
            self.state["all"]["count"] = 1

    assert "not the state of a parameter" in refused(
        lambda model: Keeping(model.parameters(), None)
    )


def test_an_accumulator_in_half_is_refused_when_the_model_is_wrapped():
    def in_half(model):
        optimizer = of(T.NAdam)(model)
        optimizer.accum_type = torch.float16
        return optimizer

    with pytest.raises(poptorch.Error, match=r"accum_type of torch\.optim\.nadam\.NAdam"):
        Pair(in_half)


def test_stochastic_rounding_of_weights_in_half_is_refused():
    opts = options()
    opts.Precision.enableStochasticRounding(True)
    inner = nn.Linear(4, 2).bfloat16()
    model = Having(lambda m, x: poptorch.identity_loss(m.inner(x), "sum"), inner=inner)
    training = poptorch.trainingModel(model, opts, T.NAdam(model.parameters()))
    with pytest.raises(poptorch.Error, match="Stochastic rounding"):
        training(torch.ones(2, 4, dtype=torch.bfloat16))


def test_a_step_that_needs_a_closure_is_refused_when_the_model_is_wrapped():
    class Closing(Weird):
        def step(self, closure):
            return closure()

    with pytest.raises(poptorch.Error, match="Closing: its step needs a closure"):
        Pair(lambda model: Closing(model.parameters(), None))


def test_an_exception_of_a_step_has_a_note_that_the_step_was_traced():
    def fail(p, group, state):
        raise KeyError("missing")

    pair = Pair(weird(fail))
    with pytest.raises(KeyError) as caught:
        pair.training(*pair.batch())
    assert "While poptorch traced the step of Weird" in str(caught.value.__notes__)


def every_third(p, group, state):
    state["count"] = state.get("count", 0) + 1
    if state["count"] % 3 == 0 and p.norm() > 0.5:
        p.mul_(0.9)
    elif p.sum() > 0:
        p.sub_(p.grad, alpha=group["lr"])


def ints_are_no_tensors(p, group, state):
    rate = group["lr"]
    rate *= 2  # not what the other weights use
    rate -= 0.05
    p.sub_(p.grad, alpha=rate)


def with_masks(p, group, state):
    mask = p.grad > 0
    p[mask] = 0.1
    p[~mask] = group["lr"]


def with_bounds(p, group, state):
    p.clamp_(-group["lr"], max(group["lr"], 0.2))
    p.add_(torch.full_like(p, group["lr"]))
    p.addmm_(p.reshape(len(p), -1), torch.ones(1, 1), alpha=group["lr"]) if p.dim() < 0 else None


def with_numbers_that_have_to_be_those_of_python(p, group, state):
    flat = p.reshape(1, -1), p.grad.reshape(1, -1)
    similar = nn.functional.cosine_similarity(*flat, eps=group["lr"])
    p.sub_(p.grad * similar * group["lr"])


def data_is_replaced(p, group, state):
    p.data = p.data - group["lr"] * p.grad.data


def norms_that_are_kept(p, group, state):
    if not state:
        state["norm"] = 0.0
    state["norm"] = 0.9 * state["norm"] + p.grad.norm().item()
    p.sub_(p.grad, alpha=group["lr"] / (1 + state["norm"]))


def by_shape(p, group, state):
    if p.dim() == 2:
        p.sub_(p.grad.mean(dim=1, keepdim=True), alpha=group["lr"])
    else:
        p.sub_(p.grad.sign(), alpha=group["lr"])


@pytest.mark.parametrize("function", [
    every_third, ints_are_no_tensors, with_masks, with_bounds, data_is_replaced,
    norms_that_are_kept, by_shape, with_numbers_that_have_to_be_those_of_python,
])  # fmt: skip
def test_code_of_a_step_means_what_it_means_in_eager_torch(function):
    pair = Pair(weird(function))
    for _ in range(7):
        pair.step()
    pair.assert_alike()


class ClippingByHand(T.Optimizer):
    """Asks whether the norm of all gradients is above a limit, and then for each weight."""

    def __init__(self, params, limit=0.1):
        super().__init__(params, {"lr": 0.1})
        self.limit = limit

    @torch.no_grad()
    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"]]
        total = torch.sqrt(sum(p.grad.pow(2).sum() for p in weights))
        if total > self.limit:
            for p in weights:
                p.grad.mul_(self.limit / total)
        for p in weights:
            if p.norm() > 1:
                p.mul_(0.9)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize("limit", [0.01, 0.3, 100.0])
def test_a_branch_may_ask_about_all_weights(limit):
    pair = Pair(lambda model: ClippingByHand(model.parameters(), limit))
    for _ in range(4):
        pair.step()
    pair.assert_alike()


class ByParameter(T.Optimizer):
    """Has numbers for parameters, by the parameter itself and by its identity."""

    def __init__(self, model, lr=0.1):
        super().__init__(model.parameters(), {"lr": lr})
        self.scales = {p: 1.0 + at for at, p in enumerate(model.parameters())}
        self.slow = {id(model.first.bias)}
        self.known = [*model.parameters()]

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.known:
            scale = self.scales[p] * (0.1 if id(p) in self.slow else 1.0)
            p.sub_(p.grad, alpha=self.param_groups[0]["lr"] * scale)


def test_attributes_may_know_parameters_and_their_identities():
    pair = Pair(ByParameter)
    for _ in range(3):
        pair.step()
    pair.assert_alike()


class DecayingRate(T.Optimizer):
    """Changes a rate that is a tensor in place."""

    def __init__(self, params, rate):
        super().__init__(params, {"lr": rate})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad)
            group["lr"].mul_(0.9)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_rate_that_a_step_changes_in_place_is_the_users_tensor(shape):
    rates = []

    def make(model):
        rates.append(torch.full(shape, 0.1))
        return DecayingRate(model.parameters(), rates[-1])

    pair = Pair(make)
    for _ in range(3):
        pair.step()
    pair.assert_alike()
    assert pair.optimizer.param_groups[0]["lr"] is rates[0]
    torch.testing.assert_close(*rates)


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.weight.requires_grad_(False)


class OfAllNorms(T.Optimizer):
    """Divides the weights that have gradients by the norm of all weights."""

    @torch.no_grad()
    def step(self, closure=None):
        weights = self.param_groups[0]["params"]
        norm = torch.sqrt(sum(p.square().sum() for p in weights))
        for p in weights:
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1).div_(1 + norm)


class DecaysAll(T.Optimizer):
    """Decays weights that have no gradients, too."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            p.mul_(0.99)
            if p.grad is not None:
                p.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize(
    ("cls", "said"),
    [
        (OfAllNorms, r"an updated value depends on a frozen parameter of shape \(5, 6\)"),
        (DecaysAll, r"a frozen parameter of shape \(5, 6\) is changed"),
    ],
)
def test_a_step_that_uses_frozen_parameters_is_refused(cls, said):
    pair = Pair(lambda model: cls(model.parameters(), {}), kind=Frozen)
    with pytest.raises(poptorch.Error, match=said):
        pair.step()


def test_a_step_that_leaves_frozen_parameters_alone_is_that_of_eager_torch():
    pair = Pair(lambda model: T.NAdam(model.parameters(), lr=0.01), kind=Frozen)
    for _ in range(3):
        pair.step()
    pair.assert_alike()


class AddingUp(T.Optimizer):
    """Adds up norms in a tensor that is an attribute, in place."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.total = torch.zeros(())

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.total.add_(p.grad.norm())
                p.sub_(p.grad / (1 + self.total), alpha=group["lr"])


def test_a_tensor_of_the_optimizer_that_a_step_changes_in_place_keeps_its_value():
    pair = Pair(lambda model: AddingUp(model.parameters()))
    for _ in range(3):
        pair.step()
    pair.assert_alike()
    torch.testing.assert_close(pair.optimizer.total, pair.twins.total)


class Wrapping(T.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.inner = T.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure=None):
        self.inner.step()


def test_an_optimizer_that_steps_another_one_is_refused_when_the_model_is_wrapped():
    model = Net()
    with pytest.raises(poptorch.Error, match="its attribute 'inner' is an optimizer"):
        wrapped(model, Wrapping(model.parameters()))
