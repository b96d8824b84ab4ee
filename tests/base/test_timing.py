"""Parts of a compilation: each moment belongs to one of them."""

import time

import pytest

from poptorch._base import timing


def test_a_part_within_another_is_none_of_it() -> None:
    with pytest.raises(ZeroDivisionError), timing.measured() as parts:
        with timing.part("outer"):
            time.sleep(0.2)
            with timing.part("inner"):
                time.sleep(0.4)
            with timing.part("inner"):
                time.sleep(0.1)
        with timing.part("failing"):
            1 / 0  # noqa: B018
    head, *rows = (line.split() for line in parts.text().splitlines())
    walls = {row[0]: float(row[1]) for row in rows}
    assert head == ["part", "wall", "processor"]
    assert walls["outer"] < 0.45 < walls["inner"] < walls["all"]
    assert "failing" not in walls
    assert walls["all"] == pytest.approx(walls["outer"] + walls["inner"], abs=0.05)
