"""Sequences that repeat themselves: what is found, and in what order it is offered."""

import pytest

from poptorch._ir.repeats import Stretch, repetitions


def first_of(stretches: list[Stretch]) -> Stretch | None:
    return stretches[0] if stretches else None


@pytest.mark.parametrize(
    "text, start, period, end",
    [
        ("xabcabcabcy", 1, 3, 10),
        ("aaaa", 0, 1, 4),
        ("abcabcab", 0, 3, 8),
        ("abacabac", 0, 4, 8),
    ],
    ids=["inside", "of one", "without an end", "of parts that repeat"],
)
def test_the_repetition_that_saves_most_is_offered_first(
    text: str, start: int, period: int, end: int
) -> None:
    assert repetitions(text, first_of) == [Stretch(start, period, end)]


def test_elements_on_both_sides_of_a_repetition_are_searched_too() -> None:
    found = repetitions("ababx" + 5 * "cdef" + "yghgh", first_of)

    assert [(each.start, each.period) for each in found] == [(0, 2), (5, 4), (26, 2)]


def test_a_repetition_whose_parts_all_repeat_by_themselves_is_found() -> None:
    """No element is equal to the one exactly one period later, as with two alternating kinds of
    steps.
    """
    found = repetitions(4 * ("abcd" + "abce" + "abcd"), first_of)

    assert found == [Stretch(0, 12, 48)]


def test_shorter_periods_than_asked_for_are_not_offered() -> None:
    assert repetitions("abababab", first_of, shortest=3) == [Stretch(0, 4, 8)]


def test_without_a_chosen_repetition_nothing_is_found() -> None:
    assert repetitions("abab", lambda stretches: None) == []


def test_a_sequence_without_repetition_has_none() -> None:
    assert repetitions("abcdef", first_of) == []


def test_a_stretch_saves_all_of_its_whole_periods_but_one() -> None:
    assert Stretch(0, 3, 11).saved == 6
