"""Slots know what they are and belong to: keys only name them, and are never taken apart."""

from __future__ import annotations

import ast

import pytest
import torch

from helpers.source_tree import PACKAGE, parse
from poptorch._ir import slots
from poptorch._ir.slots import Kind

WEIGHT = slots.param("fc.weight", (3, 2), torch.float16)


@pytest.mark.parametrize(
    ("slot", "key", "weight"),
    [
        (WEIGHT, "param.fc.weight", "fc.weight"),
        (slots.buffer("bn.mean", (3,), torch.float32), "buffer.bn.mean", ""),
        (slots.gradient(WEIGHT), "gradient.fc.weight", "fc.weight"),
        (slots.accumulator(WEIGHT, torch.float32), "accum.fc.weight", "fc.weight"),
        (
            slots.moment("velocity", WEIGHT, torch.float32),
            "optstate.velocity.fc.weight",
            "fc.weight",
        ),
        (slots.hyper("lr", 1), "hyper.1.lr", ""),
        (slots.hyper("beta1", 0), "hyper.0.one_minus_beta1", ""),
        (slots.LOSS_SCALING, "hyper.loss_scaling", ""),
        (slots.STEP, "optstate.step", ""),
        (slots.batch_input(2, (4,), torch.int32), "batch.2", None),
        (slots.result(0, torch.zeros(()), is_loss=True), "loss.0", None),
        (slots.result(1, torch.zeros(())), "output.1", None),
    ],
)
def test_a_slot_has_a_key_and_knows_its_weight(slot, key: str, weight: str | None) -> None:
    assert slot.key == key
    assert weight in (None, slot.weight)


def test_a_moment_is_that_of_another_weight_by_its_name() -> None:
    moment = slots.moment("velocity", WEIGHT, torch.float32)
    assert (moment.name, moment.shape) == ("velocity", (3, 2))
    other = slots.param("velocity.fc.weight", (5,), torch.float16)
    assert moment.of(other) == slots.moment("velocity", other, torch.float32)


def test_decay_rates_are_handed_over_as_complements() -> None:
    assert slots.hyper_value("beta1", 0.75) == 0.25
    assert slots.hyper_value("beta1", slots.hyper_value("beta1", 0.75)) == 0.75
    assert slots.hyper_value("lr", 0.75) == 0.75


SPLITTING = {
    *("partition", "rpartition", "split", "rsplit", "removeprefix", "removesuffix"),
    *("startswith", "endswith", "find", "index"),
}
ROOMS = (
    "_ir", "_capture", "_update", "_place", "_schedule", "_compile", "backends", "optim",
    "_ipu_model", "_session",
)  # fmt: skip
KINDS = tuple(f"{kind}." for kind in Kind)


def splits(tree: ast.AST) -> list[int]:
    """Lines at which something is learnt from the text of a key or path."""
    lines = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        given = [ast.unparse(argument) for argument in node.args]
        if isinstance(node.func, ast.Attribute) and node.func.attr in SPLITTING:
            receiver = ast.unparse(node.func.value)
            of_key = receiver.split(".")[-1] in ("key", "path")
            of_kind = any("Kind." in a or a.strip("f'\"").startswith(KINDS) for a in given)
            lines += [node.lineno] if of_key or of_kind else []
        elif text == "int" and given and given[0].split(".")[-1] in ("key", "path"):
            lines.append(node.lineno)
    return lines


def test_no_key_is_split() -> None:
    files = [path for room in ROOMS for path in (PACKAGE / room).rglob("*.py")]
    assert files
    assert {path.name: lines for path in files if (lines := splits(parse(path)))} == {}
    for code in (
        "slot.path.partition('.')",
        "key.startswith(f'{Kind.ACCUM}.')",
        "name.startswith('optstate.')",
        "int(slot.path)",
    ):
        assert splits(ast.parse(code)) == [1]
