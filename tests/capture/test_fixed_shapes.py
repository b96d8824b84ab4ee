"""Functions whose shapes depend on their arguments: where these are constants all is torch's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import rnn

import poptorch
from helpers.wrapping import Having, inference, trains_alike

X = torch.arange(120.0).view(5, 6, 4).sin()
COUNTS, LABELS = torch.tensor([2, 0, 1]), torch.tensor([[2, 0, 1], [0, 2, 2]])
TARGETS = torch.tensor([[1, 2, 2], [3, 1, 0]])


def choices(x, i):
    rows, labels = x[0, :3], LABELS + 0 * i
    return [
        *(torch.combinations(rows[0], r, more) for r in (1, 2, 3, 5) for more in (False, True)),
        torch.combinations(rows[0]), rows.repeat_interleave(2),
        *(torch.repeat_interleave(rows, counts, dim) for counts, dim in (
            (COUNTS, 0), (COUNTS, -2), (torch.arange(4), 1), (torch.tensor([2]), -1),
            (torch.arange(12) % 3, None))),
        rows.repeat_interleave(repeats=COUNTS, dim=0, output_size=3),
        *rows.tensor_split(torch.tensor([1, 3]), dim=1), *torch.tensor_split(rows, COUNTS[0]),
        *torch.tensor_split(rows, [1, 2], -1),
        *(F.one_hot(labels, n) for n in (3, 5)), F.one_hot(labels[0, 0], num_classes=4),
        *(torch.bincount(labels[1], minlength=n) for n in (3, 6)),
        *(labels[1].bincount(weights, 3) for weights in (rows[:, 1], COUNTS)),
        (labels[0] * 0).bincount(minlength=1),
        rows[0, 0] * COUNTS.nonzero(), rows[0, 0] * COUNTS.view(1, 3).argwhere(),
        *(rows[0, 0] * each for each in torch.nonzero(LABELS, as_tuple=True)),
    ]  # fmt: skip


def sequences(x, i):
    outs = []
    for first, lengths, how in (
        (True, [2, 4, 1, 6, 6], {}), (False, [1, 3, 2, 2, 5, 3], {"padding_value": 7.0}),
        (True, torch.tensor([3, 1, 1, 2, 2]), {"total_length": 5}),
        (False, [2, 1, 1, 2, 1, 1], {"total_length": 2}),
    ):  # fmt: skip
        packed = rnn.pack_padded_sequence(x, lengths, first, enforce_sorted=False)
        padded, found = rnn.pad_packed_sequence(packed, first, **how)
        outs += [packed.data, padded, padded.sum() * found]
    return outs


def losses(x, i):
    logs, given, ways = x[:, :2].log_softmax(-1), TARGETS + 0 * i, ("none", "mean", "sum")
    return [
        *(F.ctc_loss(logs[:, 0], given[0, :2], (5,), (2,), reduction=way) for way in ways),
        F.ctc_loss(logs, TARGETS - 1, (5, 4), (2, 1), 3, "none"),
        F.ctc_loss(logs, torch.tensor([1, 2, 2, 3, 1]), torch.tensor([5, 4]), 3 - COUNTS[1:]),
        F.ctc_loss(logs, given, (5, 3), (0, 2)), F.ctc_loss(logs[:, :1], given[:1], (4,), (3,)),
        *(F.ctc_loss(logs, given, (3, 5), (3, 2), 0, way, True) for way in ways),
    ]  # fmt: skip


def filled(x, index, value=-1.0):
    x = x * 1
    x[index] = value
    return x


def windows(x, i):
    pair = slice(i, i + 2)
    return [
        x[pair], x[i : i + 4 : 2], x[i - 1 : i + 3 : 3], x[1, i : i + 3], x[i - 5 : i - 3],
        x[None, 2, i - 1 : i + 1, None], x[..., pair], x[..., None, pair], x[..., pair, 1],
        x[1:3, ..., i - 1 : i + 2], x[pair, i + 1 : i + 3], x[:, 1:4][:, i : i + 1],
        x[i : (i + 3) - 1], x[2 - 2 + i.long() : i + 1 - 0], filled(x, pair),
        filled(x, (slice(None), slice(i - 1, i + 2))), filled(x, (..., slice(i, i + 2, 2))),
        filled(x, (1, slice(i, i + 3), None)), filled(x, (0, pair, 1), torch.tensor([1, 2])),
        filled(x, (slice(None), pair), x[0, :2] * 2),
    ]  # fmt: skip


ROWS, PAIRS, ALL = torch.arange(5) % 2 == 0, torch.arange(30).view(5, 6) % 3 == 0, X > 0.3


def masks(x, i):
    one, rows, pairs, wide = x[0, 0, 0] * 2, ROWS & (i > 0), PAIRS & (i > 0), x[:1, :1] * 2
    return [
        *(filled(x, rows, value) for value in (one, x[0] * 3, x[:1] * 3, x[0, 1] * 3, x[1, :, :1])),
        *(filled(x, pairs, value) for value in (one, x[1, 2], x[1, :1], x[1, 2, :1], wide)),
        *(filled(x, pairs, value) for value in (one.half(), one.double(), (one * 9).int(), 2.0)),
        *(filled(x, ALL & (i > 0), value) for value in (one, x[0, 0, :1], one.double())),
        filled(x, i > 0, x * 2), filled(x, i < 0, one),
        filled(x, PAIRS, x[0, :1].expand(10, 4).detach()),
    ]  # fmt: skip


@pytest.mark.parametrize("function", [sequences, losses, masks])
def test_values_and_gradients_are_those_of_torch(function) -> None:
    def forward(model, x, start):
        outs = function(x * model.weight, *start)
        total = sum(out.float().square().sum() for out in outs if out.requires_grad)
        return outs, poptorch.identity_loss(total, "none")

    model = Having(forward, weight=nn.Parameter(torch.ones(X.shape)))
    trains_alike(model, X, torch.tensor([1]), steps=1, lr=0.01)


@pytest.mark.parametrize("function", [choices, windows])
def test_values_are_those_of_torch(function) -> None:
    model = inference(function)
    for start in torch.tensor([1, 2]):
        torch.testing.assert_close(model(X, start), function(X, start), check_dtype=False)
