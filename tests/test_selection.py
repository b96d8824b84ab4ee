"""``make test`` runs a case of every test, and ``make test-full`` all of them."""

import itertools

from helpers.selection import Case, is_in

MARKED = [Case("", slow, full) for slow, full in itertools.product([False, True], repeat=2)]
# Tests of one to four cases, with the marks in every order.
TESTS = [
    [case._replace(test=str(marked)) for case in marked]
    for count in range(1, 5)
    for marked in itertools.product(MARKED, repeat=count)
]
CASES = [case for test in TESTS for case in test]


def taken(part: str, cases: list[Case]) -> list[Case]:
    """Return the cases of a part."""
    return list(itertools.compress(cases, is_in(part, cases)))


def test_make_test_runs_a_case_of_every_test_that_is_not_marked_otherwise() -> None:
    every_test = {case.test for case in CASES if not case.full}

    assert {case.test for case in taken("short", CASES)} == every_test


def test_make_test_full_runs_every_case_once() -> None:
    short, rest = is_in("short", CASES), is_in("rest", CASES)

    assert [one + other for one, other in zip(short, rest, strict=True)] == [1] * len(CASES)


def test_make_test_runs_the_first_case_of_a_test() -> None:
    assert is_in("short", [Case("several")] * 3) == [True, False, False]


def test_make_test_runs_no_case_of_a_test_that_is_left_to_make_test_full() -> None:
    assert is_in("short", [Case("full", full=True)] * 2) == [False, False]


def test_make_check_runs_first_cases_that_are_not_slow() -> None:
    cases = [Case("quick"), Case("quick"), Case("slow", slow=True), Case("full", full=True)]

    assert taken("quick", cases) == [Case("quick")]
