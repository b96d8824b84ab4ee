"""The site: every public name has an entry, made pages are whole, messages are as quoted."""

import importlib
import inspect
import pkgutil
import re
import types

import pytest

import site_pages
import words
from helpers.source_tree import ROOT
from poptorch import enums

REFERENCE = ROOT / "docs" / "reference"
LISTED = re.findall(r"^::: (\S+)", "".join(p.read_text() for p in REFERENCE.iterdir()), re.M)
ENTRIES = set(LISTED)
MODULES = (
    "poptorch", "poptorch.optim", "poptorch.profiling", "poptorch.testing", "poptorch.autocasting",
    "poptorch_geometric", "poptorch_geometric.ops", "poptorch_geometric.cluster_loader",
    "poptorch_geometric.neighbor_loader", "popdist", "popdist.poptorch",
)  # fmt: skip
SOURCES = str(ROOT / "src")


def public():
    """Yield the public names of the modules, and the values."""
    for module in map(importlib.import_module, MODULES):
        for name in getattr(module, "__all__", ()) or vars(module):
            value = getattr(module, name)
            ours = getattr(value, "__module__", "pop").startswith("pop")
            if ours and not name.startswith("_") and not isinstance(value, types.ModuleType):
                yield f"{module.__name__}.{name}", value


PUBLIC = dict(public())


@pytest.mark.slow
def test_every_public_name_is_in_the_reference() -> None:
    modules = {entry for entry in ENTRIES if entry in MODULES}
    placed = {id(pkgutil.resolve_name(entry)) for entry in ENTRIES}
    absent = [
        name
        for name, value in PUBLIC.items()
        if name not in ENTRIES
        and name.rpartition(".")[0] not in modules
        and id(value) not in placed  # under another of its names
    ]
    assert absent == [], "add a line to a page of docs/reference"
    assert sorted(LISTED) == sorted(ENTRIES), "an entry is there twice"
    assert len(PUBLIC) > 100


def docstrings():
    """Yield those of functions, classes and the public methods that are written here."""
    for name, value in PUBLIC.items():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield name, inspect.getdoc(value) or ""
        for attribute, member in vars(value).items() if inspect.isclass(value) else ():
            function = member.fget if isinstance(member, property) else member
            if not inspect.isfunction(function) or attribute.startswith("_"):
                continue
            if function.__code__.co_filename.startswith(SOURCES):  # torch_geometric writes some
                yield f"{name}.{attribute}", inspect.getdoc(getattr(value, attribute)) or ""


def test_every_public_name_is_documented_in_short_sentences() -> None:
    texts = dict(docstrings())
    assert [name for name, text in texts.items() if not text] == []
    apart = {name: re.sub(r"\n *(?=[\w, .]+:\s)", "\n\n", text) for name, text in texts.items()}
    long = {name: found for name, text in apart.items() if (found := words.long_sentences(text))}
    assert long == {}


def test_errors_by_title_and_commands_are_whole() -> None:
    page = (REFERENCE / "errors.md").read_text()
    assert "| Shape mismatch for *...* | " in page  # by a function that makes the error
    assert "| A sequence is longer than all sizes | `ValueError` | cut it, or add a size" in page
    assert "| A tensor's value is needed while the model is being captured | " in page
    shown = site_pages.commands_page()
    for command in ("poptorch doctor", "poptorch cache", "poprun", "gc-info", "gc-monitor"):
        assert f"## {command}\n\n```text\nusage: {command} [" in shown
    assert shown.count("\nexample:\n") == shown.count("\n## ")


def test_messages_are_quoted_as_they_are() -> None:
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^\| `([^`]+)` ", page, re.M)
    assert len(quoted) > 15
    code = "".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    joined = re.sub(r'"\s*f?"', "", code)  # texts over several lines
    assert [message for message in quoted if message not in joined] == []


def test_members_of_enums_are_shown() -> None:
    text = (REFERENCE / "enums.md").read_text()
    kinds = set(enums.__all__)
    aliases = {name for name in kinds if getattr(enums, name).__name__ != name}
    members = r"^::: poptorch\.(\S+)\n    options: {show_if_no_docstring: true}$"
    shown = set(re.findall(members, text, re.M))
    assert shown == kinds - aliases  # without a text of its own none is shown by default
