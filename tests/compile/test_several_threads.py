"""Two threads whose models are compiled at once."""

import concurrent.futures
import copy
import threading

import pytest
import torch
from torch import nn

import poptorch
from helpers.patience import HANGS
from helpers.wrapping import Having, options, trains_alike
from poptorch._base.threads import PerThread


def many_operators(size: int) -> nn.Module:
    """A model whose capture takes long enough to meet another one."""

    def forward(model, x, target):
        model.calls.add_(1)
        for _ in range(20):
            x = torch.tanh(model.layer(x))
        return x, nn.functional.mse_loss(x, target)

    return Having(forward, layer=nn.Linear(size, size), calls=torch.zeros(()))


@pytest.mark.slow
def test_first_calls_at_once_do_not_mix() -> None:
    torch.manual_seed(1)
    ready = threading.Barrier(2)
    given = [(many_operators(size), torch.randn(2, size), torch.randn(2, size)) for size in (3, 5)]

    def train(model: nn.Module, *batch: torch.Tensor) -> None:
        ready.wait()
        trains_alike(model, *batch)

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(train, *each) for each in given]:
            each.result(timeout=HANGS)
    assert all(type(each) is torch.Tensor for each in given[0][0].state_dict().values())


class Seen(nn.Module):
    """While it is captured another thread looks at it, copies it and uses it as eager code does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(4))
        self.looks: list[dict[str, torch.Tensor]] = []
        self.kinds: list[set[type]] = []

    def forward(self, x, target):
        if poptorch.isRunningOnIpu():
            assert type(self.layer.weight) is not nn.Parameter
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                self.looks.append(pool.submit(self.look).result(HANGS))
        return nn.functional.mse_loss(self.norm(self.layer(x)) * self.scale, target)

    def look(self) -> dict[str, torch.Tensor]:
        twin, x = copy.deepcopy(self.layer), torch.ones(2, 4)
        with torch.no_grad():
            self(x, x)
        states = (self.state_dict(keep_vars=True), dict(self.layer.named_parameters()))
        seen = {**states[0], **states[1], "copied": twin.weight, "by name": self.layer.weight}
        self.kinds.append({type(tensor) for tensor in seen.values()})
        return seen


def test_no_other_thread_meets_traced_tensors() -> None:
    """They have no data; and what the other thread does is no part of the program."""
    torch.manual_seed(1)
    model, native = Seen(), Seen()
    native.load_state_dict(model.state_dict())
    own = dict(model.layer.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options(accumulation=2), optimizer)
    x, target = torch.randn(6, 4), torch.randn(6, 4)
    training(x, target)
    assert model.looks
    for look in model.looks:
        assert model.kinds.pop() == {torch.Tensor, nn.Parameter}
        assert look["by name"] is own["weight"]
        assert look["bias"] is own["bias"]
        native.look()
    steps = torch.optim.SGD(native.parameters(), lr=0.1)
    for rows in (slice(3), slice(3, 6)):  # side by side in the program
        (native(x[rows], target[rows]) / 2).backward()
    steps.step()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, native.state_dict()[name])
    assert type(model.layer._parameters) is not PerThread


def test_calls_of_another_thread_are_no_part_of_a_capture() -> None:
    """One ends meanwhile that had begun before; all threads call torch's hooks on modules."""
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def meets(model, x):
        if poptorch.isRunningOnIpu():
            go_on.set()
            assert ended.wait(HANGS)
        return model.layer(x)

    def waits(theirs, x):
        begun.set()
        assert go_on.wait(HANGS)
        return theirs.inner(x)

    model, theirs = Having(meets, layer=nn.Linear(4, 4)), Having(waits, inner=nn.Tanh())
    theirs.register_forward_hook(lambda *_: None)  # then torch asks for all hooks at the end
    x = torch.ones(2, 4)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        result = pool.submit(theirs, x)
        result.add_done_callback(lambda _: ended.set())
        assert begun.wait(HANGS)
        wrapper = poptorch.inferenceModel(model, options())
        torch.testing.assert_close(wrapper(x), model.layer(x).detach())
        assert torch.equal(result.result(HANGS), x.tanh())
    assert not [name for name in wrapper.getTensorNames() if "Tanh" in name or "inner" in name]
