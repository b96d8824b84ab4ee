"""Values that a mask selects are the targets of a CTC loss, and nothing else."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.wrapping import Having, infer, options, training

X, LABELS = torch.randn(24, 12, 6), torch.randint(-3, 9, (24, 5)).where(torch.arange(5) > 0, 2)


def ctc(model, x, labels, more=0):
    there = labels >= 1
    scores = model.layer(x).log_softmax(-1).transpose(0, 1)
    steps = torch.full((len(x),), x.shape[1])
    return F.ctc_loss(scores, labels.masked_select(there), steps, there.sum(-1) + more)


@pytest.mark.parametrize("backend", ["reference", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("replicas", [1, 2])
def test_they_are_targets(backend: str, replicas: int) -> None:
    model = Having(ctc, layer=nn.Linear(6, 9))
    eager, micro = copy.deepcopy(model), 12 // replicas // 3
    training(model, options(backend, accumulation=3, replicas=replicas, iterations=2))(X, LABELS)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1)
    for x, labels in zip(X.split(12), LABELS.split(12), strict=True):
        theirs.zero_grad()
        for parts in zip(x.split(micro), labels.split(micro), strict=True):
            (eager(*parts) / 3 / replicas).backward()
        theirs.step()
    torch.testing.assert_close(model.layer.weight, eager.layer.weight)


def test_their_lengths_must_add_up_to_their_number() -> None:
    with pytest.raises(poptorch.Error, match="ctc_loss"):
        training(Having(lambda m, *given: ctc(m, *given, more=1), layer=nn.Linear(6, 9)))(X, LABELS)


@pytest.mark.parametrize("use", [lambda t: t + 1, lambda t: t.sum(), lambda t: len(t), torch.relu])
def test_other_uses_need_their_number(use) -> None:
    with pytest.raises(poptorch.Error, match="dynamic output shapes"):
        infer(lambda x: use(x.masked_select(x > 1)), torch.arange(4))
