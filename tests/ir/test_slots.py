"""Slots know what they are and belong to: keys only name them, and are never taken apart."""

import re

import pytest
import torch

from helpers.source_tree import PACKAGE
from poptorch._ir import slots
from poptorch._ir.slots import Kind

WEIGHT = slots.param("fc.weight", (3, 2), torch.float16)


@pytest.mark.parametrize("slot, key, weight", [
    (WEIGHT, "param.fc.weight", "fc.weight"),
    (slots.buffer("bn.mean", (3,), torch.float32), "buffer.bn.mean", ""),
    (slots.gradient(WEIGHT), "gradient.fc.weight", "fc.weight"),
    (slots.accumulator(WEIGHT, torch.float32), "accum.fc.weight", "fc.weight"),
    (slots.moment("velocity", WEIGHT, torch.float32),
     "optstate.velocity.fc.weight",
     "fc.weight"),
    (slots.hyper("lr", 1), "hyper.1.lr", ""),
    (slots.hyper("beta1", 0), "hyper.0.one_minus_beta1", ""),
    (slots.LOSS_SCALING, "hyper.loss_scaling", ""),
    (slots.STEP, "optstate.step", ""),
    (slots.batch_input(2, (4,), torch.int32), "batch.2", None),
    (slots.result(0, torch.zeros(()), is_loss=True), "loss.0", None),
    (slots.result(1, torch.zeros(())), "output.1", None),
])  # fmt: skip
def test_a_slot_has_a_key_and_knows_its_weight_and_a_moment_that_of_another(slot, key, weight):
    assert slot.key == key
    assert weight in (None, slot.weight)
    moment = slots.moment("velocity", WEIGHT, torch.float32)
    assert (moment.name, moment.shape) == ("velocity", (3, 2))
    other = slots.param("velocity.fc.weight", (5,), torch.float16)
    assert moment.of(other) == slots.moment("velocity", other, torch.float32)


ROOMS = (
    "_ir", "_capture", "_update", "_place", "_schedule", "_compile", "backends", "optim",
    "_ipu_model", "_session",
)  # fmt: skip
CALLS = r"\.(r?partition|r?split|remove(pre|suf)fix|startswith|endswith|r?find|index)\("
SPLITTING = re.compile(
    rf"\b(key|path){CALLS}|\bint\([\w.]*\b(key|path)\)"
    rf"|{CALLS}f?['\"]?\{{?(Kind\b|({'|'.join(Kind)})\.)"
)


def test_no_key_is_split() -> None:
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    lines = [(path.name, line) for path in files for line in path.read_text().splitlines()]
    assert [(name, line) for name, line in lines if SPLITTING.search(line)] == []
    assert all(map(SPLITTING.search, (
        "slot.path.partition('.')", "key.startswith(f'{Kind.ACCUM}.')",
        "name.startswith('optstate.')", "int(slot.path)",
    )))  # fmt: skip
