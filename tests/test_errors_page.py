"""scripts/errors_page.py finds all errors and their remedies in the source."""

from __future__ import annotations

from pathlib import Path

import errors_page


def found(folder: Path, code: str) -> dict[str, list[str]]:
    """Return the remedies of each error in a module with this code, by title."""
    (folder / "module.py").write_text(code)
    rows = errors_page.Source(folder).errors()
    return {title: remedies.split(errors_page.CASES) for title, _, remedies in rows}


def test_every_error_of_the_library_says_what_to_do() -> None:
    silent = [title for title, _, remedies in errors_page.errors() if not remedies]

    assert silent == []


def test_values_of_run_time_are_left_open(tmp_path: Path) -> None:
    remedies = found(tmp_path, 'raise Error(f"No {name}", fix=f"use {other}")')

    assert remedies == {f"No {errors_page.VALUE}": [f"use {errors_page.VALUE}"]}


def test_remedies_of_both_branches_of_a_condition_are_found(tmp_path: Path) -> None:
    remedies = found(tmp_path, 'raise Error("Bad", fix="do this" if case else "do that")')

    assert remedies == {"Bad": ["do this", "do that"]}


def test_title_and_remedy_are_of_the_same_case(tmp_path: Path) -> None:
    code = 'raise Error("Even" if even else "Odd", fix="use 3" if even else "use 2")'

    assert found(tmp_path, code) == {"Even": ["use 3"], "Odd": ["use 2"]}


def test_a_remedy_depends_on_the_text_that_a_caller_passes(tmp_path: Path) -> None:
    code = """
def refuse(name):
    raise Error(f"Bad {name}", fix="use 3" if name == "even" else "use 2")

refuse("even")
refuse("odd")
"""
    assert found(tmp_path, code) == {"Bad even": ["use 3"], "Bad odd": ["use 2"]}


def test_each_caller_of_a_helper_function_makes_its_own_error(tmp_path: Path) -> None:
    code = """
def refuse(title, fix):
    raise Error(title, fix=fix)

refuse("No batch", "pass a batch")
refuse("No model", "pass a model")
"""
    remedies = found(tmp_path, code)

    assert remedies == {"No batch": ["pass a batch"], "No model": ["pass a model"]}


def test_a_title_names_the_text_that_a_caller_passes(tmp_path: Path) -> None:
    code = """
def refuse(name, fix):
    raise Error(f"Cannot call {name}", fix=fix)

refuse("useIpuId", "remove the call")
"""
    assert found(tmp_path, code) == {"Cannot call useIpuId": ["remove the call"]}


def test_remedies_that_another_function_returns_are_found(tmp_path: Path) -> None:
    code = """
def advice(name):
    if name:
        return f"did you mean {name}?"
    return "remove it"

def check(name):
    raise Error("Unknown", fix=advice(name))
"""
    remedies = found(tmp_path, code)

    assert remedies == {"Unknown": [f"did you mean {errors_page.VALUE}?", "remove it"]}


def test_a_variable_has_the_value_of_its_last_assignment(tmp_path: Path) -> None:
    code = """
def check(x):
    title = "First"
    if x:
        raise Error(title, fix="a")
    title = "Second"
    raise Error(title, fix="b")
"""
    assert found(tmp_path, code) == {"First": ["a"], "Second": ["b"]}
