"""How many cores have nothing to do, from what the system counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from poptorch._base import cores


@pytest.fixture
def clock(monkeypatch) -> dict[str, float]:
    """Let the test say what time it is and how long the cores were idle; two cores."""
    now = {"time": 100.0, "idle": 1000.0}
    monkeypatch.setattr(cores.time, "perf_counter", lambda: now["time"])
    monkeypatch.setattr(cores, "idle_seconds", lambda: now["idle"])
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    return now


@pytest.mark.parametrize(("idle", "found"), [(0.0, 0.0), (1.0, 0.5), (4.0, 2.0)])
def test_idle_cores_since_the_last_time(idle: float, found: float, clock) -> None:
    watch = cores.Cores()
    assert watch.idle() == 0.0
    clock["time"] += 2.0
    clock["idle"] += idle
    assert watch.idle() == pytest.approx(found)


def test_short_times_say_nothing(clock) -> None:
    watch = cores.Cores()
    watch.idle()
    for _ in range(4):
        clock["time"] += 0.02
        clock["idle"] += 0.02
        last = watch.idle()
    assert last == 0.0
    clock["time"] += 0.04
    clock["idle"] += 0.04
    assert watch.idle() > 0.9


def test_one_core_is_never_idle(clock, monkeypatch) -> None:
    monkeypatch.setattr(cores.os, "sched_getaffinity", lambda _: {1}, raising=False)
    watch = cores.Cores()
    watch.idle()
    clock["time"] += 1
    clock["idle"] += 1
    assert watch.idle() == 0.0


def test_where_it_cannot_be_known(tmp_path: Path) -> None:
    assert cores.idle_seconds(str(tmp_path / "stat")) is None
    (tmp_path / "stat").write_text("cpu  10 20 30 400 50 0 0 0 0 0\ncpu0 1 2 3\n")
    ticks = os.sysconf("SC_CLK_TCK")
    assert cores.idle_seconds(str(tmp_path / "stat")) == pytest.approx(450 / ticks)
