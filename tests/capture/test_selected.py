"""Values that a mask selects are the targets of a CTC loss."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.twins import Twins
from helpers.wrapping import Having, options, training

X, LABELS = torch.randn(24, 12, 6), torch.randint(-3, 9, (24, 5)).where(torch.arange(5) > 0, 2)


def ctc(model, x, labels, more=0):
    """Do what speech models do: check labels, whose values are known then, and mask steps."""
    assert more or labels.max() < 9
    there, hidden = labels >= 1, x * 2
    hidden[x[..., 0] > 1] = model.masked
    scores = model.layer(hidden).log_softmax(-1).transpose(0, 1)
    steps = torch.full((len(x),), x.shape[1])
    return nn.functional.ctc_loss(scores, labels.masked_select(there), steps, there.sum(-1) + more)


@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
def test_they_are_targets(backend: str) -> None:
    counts = options(backend, accumulation=3, replicas=2)
    model = Having(ctc, layer=nn.Linear(6, 9), masked=nn.Parameter(torch.randn(6)))
    twins = Twins(model, torch.optim.Adam, counts, **near(80, 2))
    twins.wrapped(X, LABELS)
    twins.eager_step(X, LABELS)
    twins.compare()


def test_their_lengths_must_add_up_to_their_number() -> None:
    model = Having(lambda m, *given: ctc(m, *given, 1), layer=nn.Linear(6, 9), masked=torch.ones(6))
    with pytest.raises(poptorch.Error, match="ctc_loss"):
        training(model)(X, LABELS)
