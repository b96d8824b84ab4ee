"""Slots: places of tensors, their keys, and the weights they belong to."""

import re

import pytest
import torch

from helpers.source_tree import PACKAGE
from poptorch._ir import slots
from poptorch._ir.slots import Kind, Slot

WEIGHT = slots.param("fc.weight", (3, 2), torch.float16)
MOMENT = slots.moment("velocity", WEIGHT, torch.float32)


@pytest.mark.parametrize(
    "slot, key",
    [
        (WEIGHT, "param.fc.weight"),
        (slots.buffer("bn.mean", (3,), torch.float32), "buffer.bn.mean"),
        (slots.gradient(WEIGHT), "gradient.fc.weight"),
        (slots.accumulator(WEIGHT, torch.float32), "accum.fc.weight"),
        (MOMENT, "optstate.velocity.fc.weight"),
        (slots.hyper("lr", 1), "hyper.1.lr"),
        (slots.hyper("beta1", 0), "hyper.0.one_minus_beta1"),
        (slots.LOSS_SCALING, "hyper.loss_scaling"),
        (slots.STEP, "optstate.step"),
        (slots.batch_input(2, (4,), torch.int32), "batch.2"),
        (slots.result(0, torch.zeros(()), is_loss=True), "loss.0"),
        (slots.result(1, torch.zeros(())), "output.1"),
    ],
)
def test_a_slot_has_a_key(slot: Slot, key: str) -> None:
    assert slot.key == key


@pytest.mark.parametrize(
    "slot, weight",
    [
        (WEIGHT, "fc.weight"),
        (slots.buffer("bn.mean", (3,), torch.float32), ""),
        (slots.gradient(WEIGHT), "fc.weight"),
        (slots.accumulator(WEIGHT, torch.float32), "fc.weight"),
        (MOMENT, "fc.weight"),
        (slots.hyper("lr", 1), ""),
        (slots.hyper("beta1", 0), ""),
        (slots.LOSS_SCALING, ""),
        (slots.STEP, ""),
    ],
)
def test_a_slot_knows_its_weight(slot: Slot, weight: str) -> None:
    assert slot.weight == weight


def test_a_moment_has_a_name_and_the_shape_of_its_weight() -> None:
    assert MOMENT.name == "velocity"
    assert MOMENT.shape == (3, 2)


def test_the_slot_of_a_moment_gives_that_of_another_weight() -> None:
    other = slots.param("velocity.fc.weight", (5,), torch.float16)

    assert MOMENT.of(other) == slots.moment("velocity", other, torch.float32)


ROOMS = (
    "_capture",
    "_compile",
    "_cost",
    "_ipu_model",
    "_ir",
    "_place",
    "_schedule",
    "_session",
    "_update",
    "backends",
    "optim",
)
CALLS = r"\.(r?partition|r?split|remove(pre|suf)fix|startswith|endswith|r?find|index)\("
SPLITTING = re.compile(
    rf"\b(key|path){CALLS}|\bint\([\w.]*\b(key|path)\)"
    rf"|{CALLS}f?['\"]?\{{?(Kind\b|({'|'.join(Kind)})\.)"
)
"""Source code that takes a key apart, instead of asking its slot."""


@pytest.mark.parametrize("slot", [WEIGHT, slots.gradient(WEIGHT), MOMENT])
def test_a_slot_knows_the_key_of_the_same_tensor_of_another_weight(slot: Slot) -> None:
    other = slots.param("fc.bias", (3,), torch.float16)

    assert slot.key_of("fc.bias") == slot.of(other).key


def test_the_key_of_a_number_is_the_same_for_all_weights() -> None:
    assert slots.STEP.key_of("fc.bias") == slots.STEP.key


def test_no_code_parses_keys() -> None:
    paths = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    lines = [(path.name, line) for path in paths for line in path.read_text().splitlines()]

    assert [(name, line) for name, line in lines if SPLITTING.search(line)] == []


@pytest.mark.parametrize(
    "line",
    [
        "slot.path.partition('.')",
        "key.startswith(f'{Kind.ACCUM}.')",
        "name.startswith('optstate.')",
        "int(slot.path)",
    ],
)
def test_code_that_parses_a_key_is_recognised(line: str) -> None:
    assert SPLITTING.search(line)
