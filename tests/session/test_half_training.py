"""Training in half and under autocast: how far from float64, beside torch's own loop.

Distances are those of the trained models' predictions, computed in float64, over several seeds:
weights that have no effect, a bias before a batch norm for instance, move by noise alone.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.cases import long
from helpers.updating import MODELS
from helpers.wrapping import options

pytestmark = pytest.mark.slow

SEEDS, STEPS = range(4), 20
HALF = torch.float16


class Net(nn.Module):
    def __init__(self, model, autocast):
        super().__init__()
        self.model = model
        self.autocast = autocast

    def forward(self, x, labels):
        with torch.autocast("cpu", HALF, enabled=self.autocast):
            out = self.model(x)
        return F.cross_entropy(out.to(torch.promote_types(out.dtype, torch.float32)), labels)


def cast(x, dtype):
    return x.to(dtype) if x.is_floating_point() else x


def natively(net, x, labels, optimizer):
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(x, labels).backward()
        optimizer.step()


def root_mean_squares(name, autocast, kind, settings):
    """Distances of the predictions of our runs and of torch's from those of float64."""
    make, wrapped, squares = getattr(torch.optim, kind), None, []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = MODELS[name]()
        labels = torch.randint(0, 3, (32,))
        if not autocast:
            model, x = model.half(), cast(x, HALF)
        wide = cast(x, torch.float64)
        exact = Net(copy.deepcopy(model).double(), False)
        theirs = Net(copy.deepcopy(model), autocast)
        natively(exact, wide, labels, make(exact.parameters(), **settings))
        natively(theirs, x, labels, make(theirs.parameters(), **settings))
        if wrapped is None:
            ours = Net(copy.deepcopy(model), autocast)
            optimizer = make(ours.parameters(), **settings)
            afresh = copy.deepcopy(optimizer.state_dict())
            wrapped = poptorch.trainingModel(ours, options(), optimizer)
        else:  # one program is enough: it starts again with other weights
            ours.model.load_state_dict(model.state_dict())
            optimizer.load_state_dict(afresh)
            wrapped.copyWeightsToDevice()
        for _ in range(STEPS):
            wrapped(x, labels)
        with torch.no_grad():
            want = exact.model(wide)
            squares.append([
                float((copy.deepcopy(net.model).double()(wide) - want).square().sum())
                for net in (ours, theirs)
            ])  # fmt: skip
    return torch.tensor(squares).double().mean(0).sqrt().tolist()


ADAM = ("Adam", {"lr": 2.0**-7, "eps": 1e-3})
CASES = [
    # Moments are kept in float32; torch keeps them in half, where the second ones vanish.
    ("perceptron", False, ADAM, 1.0),
    long("convolutional", False, ("RMSprop", {"lr": 2.0**-9, "eps": 1e-3}), 1.0),
    # The same values are rounded, of sums in another order: what differs is noise.
    ("attention", True, ("SGD", {"lr": 0.1}), 1.05),
    ("convolutional", False, ("SGD", {"lr": 0.1, "momentum": 0.9}), 1.05),
    # Such steps amplify it: of single runs the ratio was 0.78 to 1.39, of 24 seeds 1.02.
    long("convolutional", True, ADAM, 1.1),
]


@pytest.mark.parametrize(("name", "autocast", "optimizer", "limit"), CASES)
def test_half_runs_are_no_further_from_float64_than_torchs(name, autocast, optimizer, limit):
    ours, theirs = root_mean_squares(name, autocast, *optimizer)
    assert 0 < ours <= limit * theirs
