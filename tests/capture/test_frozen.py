"""What is decided once, when a program is compiled."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, graph_of, infer, normal, options, training


@pytest.mark.slow
@pytest.mark.spec("supported_ops", 7, 8)
def test_each_part_has_its_own_mode_which_is_followed() -> None:
    def forward(model, x):
        features = model.body(x)
        out = model.head(features)
        return features, model.drop(out), poptorch.identity_loss(out.square(), "mean")

    assert (infer(nn.Dropout(0.5), torch.ones(99)) == 0).any()
    body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model = Having(forward, body=body, head=nn.Linear(4, 2), drop=nn.Dropout(0.5))
    x = normal(64, 4)
    executor = training(model, lr=0.0)
    features, dropped, _ = executor(x)
    torch.testing.assert_close(features, model.body(x).detach())
    assert (dropped == 0).any()
    assert not model.body[1].state_dict()["running_mean"].any()
    assert model.body[1].num_batches_tracked == 0
    model.train()
    features, _, _ = executor(x)
    assert (features == 0).any()
    assert model.body[1].num_batches_tracked == 1
    model.eval()
    features, dropped, _ = executor(x)
    torch.testing.assert_close(features, model.body(x).detach())
    torch.testing.assert_close(dropped, model.head(features).detach())
    assert model.body[1].num_batches_tracked == 1


@pytest.mark.spec("supported_ops", 18)
def test_new_tensors_need_no_device_and_those_from_outside_are_frozen() -> None:
    outside = torch.ones(3)

    def forward(x):
        new = torch.arange(3.0) + torch.zeros(3) + torch.full((3,), 2.0) + torch.tensor([1.0, 2, 3])
        assert new.device == x.device
        return x + new + torch.linspace(0, 1, 3), x * outside

    model = poptorch.inferenceModel(Calling(forward), options())
    x = normal(3)
    first = model(x)
    torch.testing.assert_close(first, forward(x))
    outside.fill_(5.0)
    torch.testing.assert_close(model(x), first)


@pytest.mark.spec("supported_ops", 19, 20)
def test_python_in_forward_and_hooks_runs_at_capture_only() -> None:
    ran = []

    def forward(model, x):
        for layer in model.layers:
            ran.append("forward")
            x = layer(x)
        return x

    module = Having(forward, layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)))
    module.register_forward_hook(lambda module, args, out: (ran.append("hook"), out * 2)[1])
    model, x = poptorch.inferenceModel(module, options(iterations=3).lanes(1)), normal(6, 2)
    model(x)
    count = len(ran)
    torch.testing.assert_close(model(x), module(x).detach())  # the hook's doubling is there
    assert len(ran) == count + 4
    assert {"forward", "hook"} == set(ran)
    targets = [node.target for node in graph_of(model).nodes]
    assert targets.count(torch.ops.aten.addmm.default) == 3  # the loop is unrolled
