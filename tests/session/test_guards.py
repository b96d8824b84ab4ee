"""A program does not follow some changes on the host: each is told once, and only when it is so."""

import argparse
import contextlib
import dataclasses
import time
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import PAUSE, options, training


def run(executor: poptorch.PoplarExecutor, *arguments: torch.Tensor) -> Any:
    time.sleep(PAUSE)
    return executor(*arguments)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(4, 2)

    def forward(self, x, y=None):
        out = self.second(torch.tanh(self.first(x)))
        return out if y is None else nn.functional.mse_loss(out, y)


X, Y = torch.randn(2, 3), torch.randn(2, 2)
TOLD = "The compiled program does not follow what changed on the host: "


def test_a_layer_that_is_replaced_is_said(caplog) -> None:
    for executor in (training(Net()), poptorch.inferenceModel(Net(), options())):
        arguments = (X, Y) if executor._optimizer is not None else (X,)
        run(executor, *arguments)
        run(executor, *arguments)
        assert TOLD not in caplog.text
        executor.model.second = nn.Linear(4, 2)
        run(executor, *arguments)
        run(executor, *arguments)
        assert caplog.text.count(TOLD + "layers") == 1
        assert "Net.second" in caplog.text
        caplog.clear()
        executor.model.second.bias = None
        executor.destroy()
        run(executor, *arguments)
        assert TOLD not in caplog.text  # compiled anew


def test_a_parameter_that_is_frozen_later_is_said(caplog) -> None:
    model = Net()
    executor = training(model)
    run(executor, X, Y)
    assert model.first.weight.requires_grad
    run(executor, X, Y)
    assert TOLD not in caplog.text
    model.first.weight.requires_grad_(False)
    run(executor, X, Y)
    run(executor, X, Y)
    assert caplog.text.count(TOLD + "requires_grad") == 1
    assert "first.weight is now False" in caplog.text
    executor.destroy()
    kept = model.first.weight.clone()
    run(executor, X, Y)
    assert torch.equal(model.first.weight, kept)


@pytest.mark.parametrize("library", [torch.optim, poptorch.optim])
def test_a_number_that_waits_for_set_optimizer_is_said_once(library, caplog) -> None:
    model = Net()
    optimizer = library.AdamW(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    run(executor, X, Y)
    scheduler.step()
    executor.setOptimizer(optimizer)
    run(executor, X, Y)
    assert TOLD not in caplog.text
    scheduler.step()
    for _ in range(3):
        run(executor, X, Y)
    assert caplog.text.count(TOLD) == 1
    assert "lr of the optimizer's group 0 was 0.05 and is 0.025" in caplog.text


def test_a_loaded_optimizer_brings_its_numbers_along(caplog) -> None:
    model = Net()
    first, second = (poptorch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.2))
    executor = poptorch.trainingModel(model, options(), first)
    run(executor, X, Y)
    state = first.state_dict()
    executor.setOptimizer(second)
    run(executor, X, Y)
    second.load_state_dict(state)
    run(executor, X, Y)
    assert second.param_groups[0]["lr"] == 0.1
    assert TOLD not in caplog.text


def test_hooks_of_an_optimizer_are_said(caplog) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: None)
    executor = poptorch.trainingModel(model, options(), optimizer)
    assert caplog.text.count("Hooks of the optimizer do not run (1 before") == 1
    run(executor, X, Y)
    executor.setOptimizer(optimizer)
    assert caplog.text.count("Hooks of the optimizer") == 1
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    other.register_step_post_hook(lambda *_: None)
    executor.setOptimizer(other)
    assert caplog.text.count("Hooks of the optimizer") == 2


def test_a_block_that_comes_too_late_is_said(caplog) -> None:
    for executor in (training(Net()), poptorch.inferenceModel(Net(), options())):
        model = executor.model
        arguments = (X, Y) if executor._optimizer is not None else (X,)
        poptorch.BeginBlock(model.first, ipu_id=0)
        run(executor, *arguments)
        assert "BeginBlock" not in caplog.text
        poptorch.BeginBlock(model.second, ipu_id=1)
        assert caplog.text.count("BeginBlock on a Linear of a model that is compiled") == 1
        run(executor, *arguments)
        assert TOLD not in caplog.text
        executor.destroy()
        poptorch.removeBlocks(model)
        poptorch.BeginBlock(model.first, ipu_id=0)
        assert caplog.text.count("BeginBlock on a") == 1
        caplog.clear()


def test_hooks_that_come_after_compiling_are_said(caplog) -> None:
    model = Net()
    executor = training(model)
    run(executor, X, Y)
    handle = model.first.weight.register_hook(lambda gradient: gradient * 0)
    run(executor, X, Y)
    run(executor, X, Y)
    assert caplog.text.count(TOLD + "1 hooks on layers or parameters") == 1
    executor.destroy()
    before = model.first.weight.clone()
    run(executor, X, Y)  # compiled anew, with the hook
    assert torch.equal(model.first.weight, before)
    caplog.clear()
    handle.remove()
    assert model.first.weight.shape == (4, 3)
    run(executor, X, Y)
    assert caplog.text.count(TOLD + "1 hooks") == 1


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_on_layers_that_come_after_compiling_are_said(register: str, caplog) -> None:
    for executor in (training(Net()), poptorch.inferenceModel(Net(), options())):
        arguments = (X, Y) if executor._optimizer is not None else (X,)
        run(executor, *arguments)
        run(executor, *arguments)
        assert TOLD not in caplog.text
        getattr(executor.model.second, register)(lambda *_: None)
        run(executor, *arguments)
        run(executor, *arguments)
        assert caplog.text.count(TOLD + "1 hooks") == 1
        caplog.clear()


def test_another_number_format_is_said(caplog) -> None:
    for executor in (training(Net()), poptorch.inferenceModel(Net(), options())):
        arguments = (X, Y) if executor._optimizer is not None else (X,)
        run(executor, *arguments)
        run(executor, *arguments)
        assert TOLD not in caplog.text
        executor.model.bfloat16()
        run(executor, *arguments)
        run(executor, *arguments)
        assert caplog.text.count("the number format was float32 and is bfloat16") == 1
        caplog.clear()
        executor.model.float()


def test_a_parametrization_that_comes_after_compiling_is_said(caplog) -> None:
    model = Net()
    executor = poptorch.inferenceModel(model, options())
    before = run(executor, X)
    torch.nn.utils.parametrizations.weight_norm(model.second)
    assert torch.equal(run(executor, X), before)
    run(executor, X)
    assert caplog.text.count(TOLD) == 1
    assert "Linear.parametrizations" in caplog.text


@pytest.mark.slow
def test_a_forward_that_is_replaced_is_said_once(caplog) -> None:
    for wrap in (training, lambda model: poptorch.inferenceModel(model, options())):
        model = Net()
        model.more = nn.ModuleList(nn.Linear(1, 1) for _ in range(20))  # several calls' worth
        executor = wrap(model)
        arguments = (X, Y) if executor._optimizer is not None else (X,)
        for _ in range(7):
            run(executor, *arguments)
        assert TOLD not in caplog.text
        _triple(model.second)
        for _ in range(14):
            run(executor, *arguments)
        assert caplog.text.count("forward of a Linear") == 1
        _triple(model)
        for _ in range(7):
            run(executor, *arguments)
        assert caplog.text.count("forward of a Net") == 1
        caplog.clear()
        executor.destroy()
        executor = wrap(model)
        expected = model(*arguments)
        torch.testing.assert_close(run(executor, *arguments), expected)
        for _ in range(7):
            run(executor, *arguments)
        assert TOLD not in caplog.text  # compiled with both


def _triple(module: nn.Module) -> None:
    forward = module.forward
    module.forward = lambda first, *rest: forward(3 * first, *rest)


def test_a_forward_that_is_replaced_before_the_first_call_is_said_too(caplog) -> None:
    model = Net()
    executor = poptorch.inferenceModel(model, options())
    _triple(model)
    run(executor, X)
    run(executor, X)
    assert caplog.text.count("forward of a Net") == 1


def test_another_forward_of_a_class_is_said_once(caplog, monkeypatch) -> None:
    model = Net()
    executor = poptorch.inferenceModel(model, options())
    before = run(executor, X)
    kinds = {type(module) for module in model.modules()}
    original = nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda layer, x: original(layer, 3 * x))
    for _ in range(2 * len(kinds)):
        assert torch.equal(run(executor, X), before)
    assert caplog.text.count("forward of a Linear") == 1
    executor.destroy()
    torch.testing.assert_close(run(executor, X), model(X))


class Shift(nn.Module):
    def train(self, mode=True):
        self.size = 1.0 if mode else 0.0
        return super().train(mode)

    def forward(self, x):
        return x + self.size


class Annealed(Net):
    def __init__(self):
        super().__init__()
        self.drop, self.shift = nn.Dropout(0.5), Shift().train()
        self.temperature, self.calls, self._private, self.kept = 1.0, 0, 1, None

    def forward(self, x, y=None):
        self.calls += 1
        return super().forward(self.shift(self.drop(x)) / self.temperature, y)


CHANGES = {
    "of the model": (lambda m: setattr(m, "temperature", 0.5), "temperature was 1.0 and is 0.5"),
    "of a layer": (lambda m: setattr(m.drop, "p", 0.1), "Dropout.p of drop was 0.5 and is 0.1"),
    "to a tensor": (lambda m: setattr(m, "temperature", torch.ones(2)), "is tensor([1., 1.])"),
    "taken out": (lambda m: delattr(m.drop, "p"), "was 0.5 and is None"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("wrap", [training, lambda m: poptorch.inferenceModel(m, options())])
def test_a_number_of_a_module_that_changes_is_said_once(wrap, change, caplog) -> None:
    model = Annealed()
    executor, arguments = wrap(model), (X, Y) if wrap is training else (X,)
    for _ in range(4):
        run(executor, *arguments)
        model.calls += 1  # forward counts, too
        model._private += 1
    assert TOLD not in caplog.text
    do, said = CHANGES[change]
    do(model)
    for _ in range(4):
        run(executor, *arguments)
    assert caplog.text.count(TOLD) == 1
    assert said in caplog.text


def test_a_number_that_belongs_to_a_mode_is_followed(caplog) -> None:
    model = Annealed()
    model.drop.p = 0.0
    executor = training(model)
    for mode in (True, False, True, False):
        model.train(mode)
        expected = model(X, Y).detach()
        torch.testing.assert_close(run(executor, X, Y), expected)
    assert TOLD not in caplog.text
    executor.destroy()
    model.temperature = 2.0
    expected = model(X, Y).detach()
    torch.testing.assert_close(run(executor, X, Y), expected)
    assert TOLD not in caplog.text  # compiled anew


def test_a_number_that_changes_between_wrapping_and_compiling_counts_in_training(caplog) -> None:
    model = Annealed()
    executor = training(model)
    model.drop.p, model.temperature = 0.0, 2.0
    expected = model(X, Y).detach()
    torch.testing.assert_close(run(executor, X, Y), expected)
    assert TOLD not in caplog.text


def test_a_number_that_changes_between_wrapping_for_inference_and_compiling_is_said(caplog) -> None:
    model = Annealed().eval()
    expected = model(X).detach()
    executor = poptorch.inferenceModel(model, options())
    model.temperature = 2.0
    for _ in range(3):
        torch.testing.assert_close(run(executor, X), expected)
    assert caplog.text.count(TOLD + "Annealed.temperature was 1.0 and is 2.0: ") == 1


@dataclasses.dataclass
class Config:
    scale: float = 1.0


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.factors, self.settings = [1.0, 2.0], {"shift": 0.5, "sizes": (1, 2)}
        self.mask, self.masks = torch.tensor([1.0, 0.0, 1.0]), [torch.ones(3), torch.zeros(3)]
        self.config, self.args = Config(), argparse.Namespace(offset=0.0)
        self.log, self.seen, self.unused = [0.0], {"first": 0.0}, torch.zeros(3)

    def forward(self, x, y=None):
        out = self.weight * x * self.factors[1] + self.settings["shift"] * self.mask + self.masks[0]
        out = out * self.config.scale + self.args.offset
        return out if y is None else nn.functional.mse_loss(out, y)


INSIDE = {
    "of a list": (lambda m: m.factors.__setitem__(1, 3.0), "factors was [1.0, 2.0] and is [1.0, 3"),
    "of a dict": (lambda m: m.settings.update(shift=1.0), "settings was {'shift': 0.5,"),
    "deeper": (lambda m: m.settings.update(sizes=(1, 3)), "and is {'shift': 0.5, 'sizes': (1, 3)}"),
    "shorter": (lambda m: m.factors.pop(), "factors was [1.0, 2.0] and is [1.0]"),
    "a tensor": (lambda m: setattr(m, "mask", torch.zeros(3)), "is tensor([0., 0., 0.])"),
    "in place": (lambda m: m.mask.zero_(), "Weighted.mask was written in place"),
    "in a list": (lambda m: m.masks.__setitem__(0, torch.zeros(3)), "Weighted.masks was [tensor("),
    "of a dataclass": (lambda m: setattr(m.config, "scale", 2.0), "Config.scale of config was 1.0"),
    "of arguments": (lambda m: setattr(m.args, "offset", 1.0), "Namespace.offset of args was 0.0"),
    "in place, in a list": (lambda m: m.masks[0].zero_(), "Weighted.masks was written in place"),
}


@pytest.mark.parametrize("change", INSIDE)
@pytest.mark.parametrize("wrap", [training, lambda m: poptorch.inferenceModel(m, options())])
def test_a_list_or_tensor_that_changes_is_said_once(wrap, change, caplog) -> None:
    model = Weighted()
    executor, arguments = wrap(model), (X, X) if wrap is training else (X,)
    for call in range(4):
        run(executor, *arguments)
        model.log.append(1.0)
        model.seen[str(call)] = 1.0
        model.unused = torch.full((3,), float(call))
    assert TOLD not in caplog.text
    do, said = INSIDE[change]
    do(model)
    for _ in range(4):
        run(executor, *arguments)
    assert caplog.text.count(TOLD) == 1
    assert said in caplog.text


def test_a_tensor_that_is_replaced_between_wrapping_and_compiling_counts_in_training(
    caplog,
) -> None:
    model = Weighted()
    executor = training(model)
    model.mask, model.factors = torch.zeros(3), [0.0, 5.0]
    expected = model(X, X).detach()
    torch.testing.assert_close(run(executor, X, X), expected)
    model.mask = model.mask.clone()
    run(executor, X, X)
    assert TOLD not in caplog.text  # the values are the same
    model.mask = torch.ones(3)
    run(executor, X, X)
    assert "mask was tensor([0., 0., 0.]) and is tensor([1., 1., 1.])" in caplog.text


def test_a_tensor_that_is_replaced_between_wrapping_for_inference_and_compiling_is_said(
    caplog,
) -> None:
    model = Weighted()
    executor = poptorch.inferenceModel(model, options())
    model.mask = torch.zeros(3)
    run(executor, X)
    run(executor, X)
    assert "mask was tensor([1., 0., 1.]) and is tensor([0., 0., 0.])" in caplog.text


EDITS = {
    "load_state_dict": lambda m: m.load_state_dict(Net().state_dict()),
    "in place": lambda m: m.second.weight.detach().zero_(),
    "init": lambda m: nn.init.ones_(m.first.bias),
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("wrap", [training, lambda m: poptorch.inferenceModel(m, options())])
def test_weights_that_wait_to_be_copied_are_said_once(wrap, edit, caplog) -> None:
    model = Net()
    executor, arguments = wrap(model), (X, Y) if wrap is training else (X,)
    for _ in range(2):
        run(executor, *arguments)
        assert model.first.weight.isfinite().all()  # comes down where it was trained
    EDITS[edit](model)
    executor.copyWeightsToDevice()
    run(executor, *arguments)
    assert TOLD not in caplog.text
    EDITS[edit](model.apply(lambda layer: [p.detach().add_(1.0) for p in layer.parameters()]))
    for _ in range(2):
        run(executor, *arguments)
    assert caplog.text.count(TOLD) == 1


def test_all_changes_are_told_in_one_message(caplog) -> None:
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    executor = poptorch.trainingModel(model, options(), optimizer)
    run(executor, X, Y)
    model.temperature, model.second = 2.0, nn.Linear(4, 2)
    optimizer.param_groups[0]["lr"] = 0.2
    run(executor, X, Y)
    run(executor, X, Y)
    (told,) = [record.getMessage() for record in caplog.records if TOLD in record.getMessage()]
    parts = ("Annealed.second", "temperature was 1.0 and is 2.0", "lr of the optimizer's group 0")
    assert all(part in told for part in (*parts, "destroy()", "setOptimizer(optimizer)"))


class Sized(Net):
    """Which is false, as models that count something may be."""

    def __len__(self) -> int:
        return 0


@pytest.mark.parametrize("kind", [Net, Sized])
@pytest.mark.parametrize("clip", ["clip_grad_norm_", "clip_grad_value_"])
def test_clipping_on_the_host_is_said_once(clip, kind, caplog) -> None:
    model = kind()
    executor = training(model)
    for _ in range(3):
        run(executor, X, Y)
        list(model.parameters())
        run(executor, X, Y)
        with contextlib.suppress(RuntimeError):  # clip_grad_value_ wants a gradient
            getattr(nn.utils, clip)(model.parameters(), 1.0)
    assert caplog.text.count(f"{clip} finds no gradients in a model that is wrapped") == 1


def test_a_weight_whose_memory_is_gone_is_not_looked_at(caplog) -> None:
    model = Net()
    executor = poptorch.inferenceModel(model, options())
    expected = run(executor, X)
    model.first.weight.untyped_storage().resize_(0)
    for _ in range(4):
        assert torch.equal(run(executor, X), expected)
    assert TOLD not in caplog.text


class Heated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x, y=None):
        out = self.layers(x) * self.temperature
        return out if y is None else nn.functional.mse_loss(out, y)


@pytest.mark.parametrize("wrap", [training, lambda m: poptorch.inferenceModel(m, options())])
def test_a_buffer_that_is_changed_is_said_once(wrap, caplog) -> None:
    model = Heated()
    executor, arguments = wrap(model), (X, Y) if wrap is training else (X,)
    for mode in (False, True, False, True):
        model.train(mode)
        run(executor, *arguments)
        assert model.layers[1].running_mean.isfinite().all()  # comes down
    assert TOLD not in caplog.text
    for _ in range(4):
        model.temperature.fill_(0.5)
        run(executor, *arguments)
    assert caplog.text.count(TOLD + "'temperature' on the host") == 1


def test_a_fixed_weight_that_is_changed_is_said_after_others_came_down(caplog) -> None:
    model = Net()
    model.first.requires_grad_(False)
    executor = training(model)
    run(executor, X, Y)
    nn.init.ones_(model.first.weight)
    executor.copyWeightsToHost()
    run(executor, X, Y)
    assert caplog.text.count(TOLD + "'first.weight' on the host") == 1


def test_weights_that_were_put_back_or_come_from_a_trainer_are_not_said(caplog) -> None:
    model = Net()
    validation, trainer = poptorch.inferenceModel(model, options()), training(model)
    other = training(nn.Sequential(model.first, nn.Flatten(), Loss()))
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
    assert TOLD not in caplog.text


class Loss(nn.Module):
    def forward(self, x):
        return poptorch.identity_loss(x.pow(2).mean(), reduction="none")
