"""``popart``: scripts that set its enums run, and what they mean is kept."""

import json
from enum import IntEnum

import pytest
import torch

import popart
import poptorch
from helpers.wrapping import options
from poptorch.options.popart import LAST_MEMBER

KEYS = {
    popart.AccumulateOuterFragmentSchedule: "accumulateOuterFragmentSettings.schedule",
    popart.BatchSerializationBatchSchedule: "batchSerializationSettings.batchSchedule",
    popart.RecomputationType: "autoRecomputation",
    popart.SubgraphCopyingStrategy: "subgraphCopyingStrategy",
    popart.SyntheticDataMode: "syntheticDataMode",
    popart.VirtualGraphMode: "virtualGraphMode",
}


@pytest.mark.parametrize("kind", KEYS)
def test_every_member_is_a_value_of_its_key(kind: type[IntEnum], tmp_path) -> None:
    key = KEYS[kind]
    assert sorted(kind) == list(range(len(kind)))
    assert LAST_MEMBER.get(key, max(kind)) == max(kind)
    opts = options()
    opts._Popart.set(key, max(kind))
    executor = poptorch.inferenceModel(torch.nn.ReLU(), opts)
    executor(torch.ones(1))
    stored = executor.options._Popart.options[key]
    assert (type(stored), stored) == (int, max(kind))
    json.dumps(executor.options.toDict())
    executor.save(tmp_path / "x.poptorch")
    loaded = poptorch.load(tmp_path / "x.poptorch", model=torch.nn.ReLU())
    assert loaded.options._Popart.options[key] == max(kind)


def test_recomputation_is_done() -> None:
    kept = options()
    kept._Popart.set("autoRecomputation", int(popart.RecomputationType.RecomputeAll))
    assert "autoRecomputation" not in str(kept.withoutEffect())
    other = options()
    other._Popart.set("subgraphCopyingStrategy", popart.SubgraphCopyingStrategy.JustInTime)
    assert "subgraphCopyingStrategy" in str(other.withoutEffect())
