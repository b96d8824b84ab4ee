"""The table of the seconds that each part of a compilation takes."""

import pytest

from poptorch._base import timing


def seconds(monkeypatch: pytest.MonkeyPatch, wall: list[float], processor: list[float]) -> None:
    """Let a clock show these seconds, one after another."""
    clock = zip(wall, processor, strict=True)
    monkeypatch.setattr(timing, "_now", lambda: next(clock))


def test_the_time_of_a_nested_part_does_not_count_for_the_outer_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds(monkeypatch, wall=[0, 1, 3, 6, 7, 9], processor=[0, 1, 2, 3, 4, 5])
    with timing.measured() as parts, timing.part("outer"), timing.part("inner"):
        pass

    assert [line.split() for line in parts.text().splitlines()[1:]] == [
        ["the", "rest", "3.00", "2.00"],
        ["outer", "3.00", "2.00"],
        ["inner", "3.00", "1.00"],
        ["all", "9.00", "5.00"],
    ]


def test_parts_that_take_no_time_have_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds(monkeypatch, wall=[0, 0.001, 2.001, 2.002], processor=[0, 0.001, 1.001, 1.002])
    with timing.measured() as parts, timing.part("capture"):
        pass

    assert "the rest" not in parts.text()
