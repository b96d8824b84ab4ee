"""Parts of a compilation: each moment belongs to one of them."""

import itertools

import pytest

from poptorch._base import timing


def test_a_part_within_another_is_none_of_it(monkeypatch) -> None:
    clock = zip(itertools.count(0.0), itertools.repeat(0.0), strict=False)
    monkeypatch.setattr(timing, "_now", clock.__next__)
    with pytest.raises(ZeroDivisionError), timing.measured() as parts:
        with timing.part("outer"):
            for _ in range(2):
                with timing.part("inner"):
                    pass
        with timing.part("failing"):
            1 / 0  # noqa: B018
    rows = [line.split() for line in parts.text().splitlines()]
    assert {row[0]: row[-2] for row in rows if row[0] != "the"} == {
        "part": "wall", "outer": "3.00", "inner": "2.00", "failing": "1.00", "all": "9.00",
    }  # fmt: skip
