"""Systems: device ids of chips and groups, and what the environment describes."""

from __future__ import annotations

import pytest

import poptorch
from poptorch import _systems
from poptorch._systems import KINDS, System


def test_groups_have_ids_after_the_single_chips() -> None:
    devices = System(KINDS["mk2"], 4).devices
    assert [list(chips) for chips in devices] == [[0], [1], [2], [3], [0, 1], [2, 3], [0, 1, 2, 3]]
    assert [list(chips) for chips in System(KINDS["mk2"], 3).devices] == [[0], [1], [2], [0, 1]]
    assert System(KINDS["mk2"], 0).devices == []
    assert len(System(KINDS["mk2"], 64).devices) == 127


def test_the_smallest_devices_that_do() -> None:
    system = System(KINDS["mk2"], 8)
    assert system.of_size(1) == list(range(8))
    assert system.of_size(2) == [8, 9, 10, 11]
    assert system.of_size(3) == system.of_size(4) == [12, 13]
    assert system.of_size(9) == []


def test_the_environment_describes_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POPTORCH_POD", raising=False)
    assert _systems.system_of() == _systems.current() == System(KINDS["mk2"], 64)
    monkeypatch.setenv("POPTORCH_POD", "0")  # without IPUs programs are priced all the same
    assert _systems.system_of() == System(KINDS["mk2"], 64)
    monkeypatch.setenv("POPTORCH_POD", "bow:16")
    assert _systems.current() == System(KINDS["bow"], 16)
    assert _systems.system_of().name == "virtual-bow-16"
    assert _systems.system_of("mk1:2") == System(KINDS["mk1"], 2)
    for wrong in ("many", "gpu:4", "mk2:", "-1"):
        monkeypatch.setenv("POPTORCH_POD", wrong)
        with pytest.raises(poptorch.Error, match="POPTORCH_POD describes no system"):
            _systems.current()
