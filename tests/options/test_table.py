"""The table of options: every field of the Spec has a row and a reader, every row an effect."""

from __future__ import annotations

import dataclasses
import inspect
import re

import pytest

from helpers.source_tree import PACKAGE
from poptorch._ir.loops import Loops
from poptorch._ir.spec import (
    Location,
    Locations,
    NamedStage,
    Output,
    Placement,
    Precision,
    Reduction,
    Runtime,
    Spec,
    Target,
)
from poptorch.options import Options
from poptorch.options.overview import settings
from poptorch.options.table import IDLE

PARTS = {
    "": Spec,
    "loops": Loops,
    "output": Output,
    "reduction": Reduction,
    "precision": Precision,
    "target": Target,
    "runtime": Runtime,
    "placement": Placement,
    "locations": Locations,
}
VALUES = [value for setting in settings(Options()) for value in setting.row.values]
# Public methods that stand for other options, or for none.
NO_SETTERS = {
    "anchorMode", "appendToLocationExcludes", "clone", "createOrSet", "defaultAnchorMode",
    "defaultOutputMode", "deleteIfExists", "enablePipelining", "exists", "from_json",
    "loadFromFile", "profile", "set", "toDict", "update", "withoutEffect",
    "Training.accumulationReductionType", "Precision.runningStatisticsAlwaysFloat",
    "Precision.runningVarianceAlwaysFloat",
}  # fmt: skip


def test_every_field_of_the_spec_is_read() -> None:
    """By its name: what does not read it, or reads another's, the tests of that part show."""
    sources = [
        path.read_text()
        for path in PACKAGE.rglob("*.py")
        if "options" not in path.relative_to(PACKAGE).parts
    ]
    read = set(re.findall(r"\.(\w+)\b(?!\s*=[^=])", "\n".join(sources)))
    classes = [*PARTS.values(), NamedStage, Location]
    fields = {field.name for cls in classes for field in dataclasses.fields(cls)}
    assert fields <= read, "give it a reader or remove it"
    assert "log_dir" not in read  # a name that only options know


def test_every_field_of_the_spec_has_a_row() -> None:
    known = {
        f"{part}.{field.name}".strip(".")
        for part, cls in PARTS.items()
        for field in dataclasses.fields(cls)
    }
    named = {path for value in VALUES for path in (value.field, value.decides) if path}
    assert named <= known
    # The small model's tiles come from a variable; ``training`` from the wrapper; which part this
    # is from the index of the process, which decides another field; how many machines there are
    # from the job.
    own = known - PARTS.keys() - {"training", "target.tiles", "target.part", "target.hosts"}
    assert own == {path for path in own if path in named or path.rpartition(".")[0] in named}


def test_every_setter_has_a_row() -> None:
    rows = [setting.option for setting in settings(Options())]
    assert len(rows) == len(set(rows))
    groups = {"": Options, "Training.": None, "Precision.": None}
    for prefix, cls in groups.items():
        cls = cls or type(getattr(Options(), prefix[:-1]))
        members = inspect.getmembers(cls) if not prefix else vars(cls).items()
        methods = {
            prefix + name
            for name, member in members
            if inspect.isfunction(member) and not name.startswith("_")
        }
        written = {name for name in rows if name.rpartition(".")[0] == prefix[:-1]}
        assert methods - NO_SETTERS == written


@pytest.mark.parametrize("setting", settings(Options()), ids=lambda setting: setting.option)
def test_an_option_has_an_effect_or_is_listed(setting) -> None:
    consumers = [value.field or value.decides or value.reader for value in setting.row.values]
    assert setting.row.sentence.endswith(".")
    if setting.row.effect in IDLE:
        assert not any(value.field or value.reader for value in setting.row.values)
    else:
        assert any(consumers), "nothing reads it: mark it as a hint, so that it is listed"
    for value in setting.row.values:
        if value.reader:
            text = (PACKAGE / f"{value.reader}.py").read_text()
            assert value.name in text or setting.option.partition(".")[0] in text
