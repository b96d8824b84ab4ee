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


@pytest.mark.parametrize("name", MODELS)
def test_half_models_are_no_further_from_float64_than_torchs(name):
    """Moments are kept in float32; torch keeps them in half, where the second ones vanish."""
    for kind, rate in (("Adam", 2.0**-7), ("RMSprop", 2.0**-9)):
        ours, theirs = root_mean_squares(name, False, kind, {"lr": rate, "eps": 1e-3})
        assert 0 < ours <= theirs, (kind, ours, theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    "autocast, settings", [(False, {"lr": 0.1, "momentum": 0.9}), (True, {"lr": 0.1})]
)
def test_where_the_roundings_are_torchs_so_are_the_distances(name, autocast, settings):
    """The same values are rounded, of sums in another order: what differs is noise."""
    ours, theirs = root_mean_squares(name, autocast, "SGD", settings)
    assert 0 < ours <= 1.05 * theirs


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("kind", "rate"), [("Adam", 2.0**-7), ("RMSprop", 2.0**-9)])
def test_adaptive_steps_under_autocast_are_as_far_as_torchs(name, kind, rate):
    """Such steps amplify the noise: of single runs the ratio was 0.78 to 1.39, of 24 seeds 1.02."""
    ours, theirs = root_mean_squares(name, True, kind, {"lr": rate, "eps": 1e-3})
    assert 0 < ours <= 1.1 * theirs
