"""Which optimizer may replace the compiled one, and what the errors say."""

import logging

import pytest
import torch

import poptorch
from poptorch import optim
from poptorch.enums import MeanReductionStrategy
from poptorch.optim.freeze import freeze
from poptorch.optim.replacement import AttributeWatch, check_replacement, needs_running_mean


@pytest.fixture
def weights():
    return [torch.nn.Parameter(torch.zeros(n + 1)) for n in range(3)]


def spec(optimizer):
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return freeze(optimizer, {p.data_ptr(): f"p{p.numel()}" for p in parameters})[0]


@pytest.mark.spec("optimizers", 9)
def test_allowed_changes(weights):
    native = torch.optim.SGD(weights, lr=0.1)
    compiled = spec(native)
    native.param_groups[0]["lr"] = 0.0
    check_replacement(compiled, spec(native))
    check_replacement(compiled, spec(optim.SGD(weights, lr=3.0)))
    adam = optim.Adam(weights, lr=0.1, betas=(0.1, 0.2), loss_scaling=2.0)
    other = optim.Adam(weights, lr=0.3, betas=(0.9, 0.99), loss_scaling=1.0)
    check_replacement(spec(adam), spec(other))
    check_replacement(compiled, spec(torch.optim.SGD(weights[::-1], lr=0.1)))


REFUSED = {
    "type": (
        lambda w: torch.optim.SGD(w, lr=0.1),
        lambda w: torch.optim.Adam(w, lr=0.1),
        "type of the optimizer cannot change",
    ),
    "combined": (
        lambda w: optim.SGD(w, lr=0.1),
        lambda w: optim.SGD(w, lr=0.1, use_combined_accum=True),
        "type of the optimizer cannot change",
    ),
    "value": (
        lambda w: optim.SGD([{"params": w, "momentum": 0.5}], lr=0.1),
        lambda w: optim.SGD([{"params": w, "momentum": 0.9}], lr=0.1),
        "Values are constant but do not match",
    ),
    "betas": (
        lambda w: optim.Adam(w),
        lambda w: optim.Adam([{"params": w, "betas": (0.5, 0.999)}]),
        "Values are constant but do not match",
    ),
    "constant becomes variable": (
        lambda w: torch.optim.SGD(w, lr=0.1),
        lambda w: torch.optim.SGD(w, lr=0.1, momentum=0.9),
        "'momentum' of parameter group 0 is compiled as constant",
    ),
    "variable becomes constant": (
        lambda w: optim.SGD(w, lr=0.1, loss_scaling=1.0),
        lambda w: optim.SGD(w, lr=0.1),
        "'loss_scaling' is compiled as variable",
    ),
    "clipping": (
        lambda w: optim.AdamW(w),
        lambda w: optim.AdamW(w, max_grad_norm=1.0),
        "Values are constant but do not match",
    ),
    "moment type": (
        lambda w: optim.LAMB(w),
        lambda w: optim.LAMB(w, first_order_momentum_accum_type=torch.float16),
        "Values are constant but do not match",
    ),
    "bias correction": (
        lambda w: optim.AdamW(w),
        lambda w: optim.AdamW(w, bias_correction=False),
        "Values are constant but do not match",
    ),
    "centered": (
        lambda w: optim.RMSprop(w),
        lambda w: torch.optim.RMSprop([{"params": w, "centered": True}], lr=0.01),
        "Values are constant but do not match|compiled as constant",
    ),
    "number of groups": (
        lambda w: optim.SGD(w, lr=0.1),
        lambda w: optim.SGD([{"params": w[:1]}, {"params": w[1:]}], lr=0.1),
        "number of parameter groups cannot change",
    ),
    "members": (
        lambda w: optim.SGD(w, lr=0.1),
        lambda w: optim.SGD(w[1:], lr=0.1),
        "parameters of a group cannot change",
    ),
}


@pytest.mark.parametrize("compiled, new, message", REFUSED.values(), ids=REFUSED)
def test_refused_changes(compiled, new, message, weights):
    with pytest.raises(poptorch.Error, match=message) as caught:
        check_replacement(spec(compiled(weights)), spec(new(weights)))
    assert "Fix:" in str(caught.value)


def test_messages_name_the_attribute_and_the_remedy(weights):
    compiled, new = optim.Adam(weights), optim.Adam([{"params": weights, "betas": (0.5, 0.5)}])
    with pytest.raises(poptorch.Error) as caught:
        check_replacement(spec(compiled), spec(new))
    assert "'betas' of parameter group 0 is 0.5; compiled: 0.9" in str(caught.value)
    assert "markAsVariable('betas')" in str(caught.value)


def test_half_accumulators_need_the_running_mean(weights):
    half = spec(optim.SGD(weights, lr=0.1, accum_type=torch.float16))
    single = spec(optim.SGD(weights, lr=0.1))
    combined = optim.SGD(weights, lr=0.1, accum_type=torch.float16, use_combined_accum=True)
    assert needs_running_mean(half)
    assert not needs_running_mean(single)
    assert not needs_running_mean(spec(combined))
    with pytest.raises(ValueError, match="is already compiled"):
        check_replacement(single, half, MeanReductionStrategy.Post)
    check_replacement(half, half, MeanReductionStrategy.Running)


class TestUnexpectedAttributes:
    def test_new_names_are_one_warning_for_each_place(self, weights, caplog):
        optimizer = optim.SGD(weights, lr=0.1)
        watch = AttributeWatch(optimizer)
        watch.check(optimizer)
        assert not caplog.records
        optimizer.mood = 1
        optimizer.defaults["size"] = 2
        optimizer.param_groups[0]["colour"] = 3
        watch.check(optimizer)
        watch.check(optimizer)
        assert [record.getMessage() for record in caplog.records] == [
            "Ignoring unexpected optimizer attribute in SGD optimizer: mood",
            "Ignoring unexpected default group variable in SGD optimizer: size",
            "Ignoring unexpected group attribute in SGD optimizer: colour",
        ]

    @pytest.mark.spec("optimizers", 11)
    def test_relaxed(self, weights, caplog):
        optimizer = optim.SGD(weights, lr=0.1)
        watch = AttributeWatch(optimizer)
        optimizer.mood = 1
        with caplog.at_level(logging.DEBUG, "poptorch::python"):
            watch.check(optimizer, relaxed=True)
        assert [record.levelno for record in caplog.records] == [logging.DEBUG]

    @pytest.mark.spec("optimizers", 7)
    def test_a_loss_scaling_of_a_group_is_unexpected(self, weights, caplog):
        optimizer = optim.SGD(weights, lr=0.1)
        watch = AttributeWatch(optimizer)
        optimizer.param_groups[0]["loss_scaling"] = 4.0
        watch.check(optimizer)
        assert "unexpected group attribute in SGD optimizer: loss_scaling" in caplog.text
        assert spec(optimizer).setting("loss_scaling") == 1.0

    def test_the_many_attributes_of_a_schedule_are_one_line(self, weights, caplog):
        groups = [{"params": [weight]} for weight in weights]
        optimizer = optim.SGD(groups, lr=0.1, momentum=0.9)
        watch = AttributeWatch(optimizer)
        torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
        watch.check(optimizer)
        watch.check(optimizer)
        assert [r.getMessage() for r in caplog.records] == [
            "Ignoring unexpected group attribute in SGD optimizer: "
            "initial_lr, max_lr, min_lr, max_momentum, base_momentum"
        ]

    @pytest.mark.parametrize("library", [torch.optim, optim])
    def test_schedulers_before_and_after(self, library, weights, caplog):
        early, late = (library.SGD(weights, lr=0.1) for _ in range(2))
        torch.optim.lr_scheduler.StepLR(early, 1)
        watch = AttributeWatch(early)
        watch.check(early)
        assert not caplog.records
        watch = AttributeWatch(late)
        torch.optim.lr_scheduler.StepLR(late, 1)
        watch.check(late)
        assert [r.getMessage() for r in caplog.records] == [
            "Ignoring unexpected group attribute in SGD optimizer: initial_lr"
        ]

    def test_another_library_and_a_native_step_are_not_unexpected(self, weights, caplog):
        native = torch.optim.AdamW(weights)
        watch = AttributeWatch(native)
        native.step()
        watch.check(native)
        watch.check(optim.AdamW(weights, bias_correction=True))
        watch.check(optim.SGD(weights, lr=0.1, use_combined_accum=True))
        assert not caplog.records
