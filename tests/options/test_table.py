"""The table of options: every field of the Spec has a row and a reader, every row an effect."""

import dataclasses
import inspect
import re
from pathlib import Path

from helpers.source_tree import PACKAGE
from poptorch._ir.spec import Spec
from poptorch.options import Options
from poptorch.options.overview import settings

# Public methods that stand for other options, or for none.
NO_SETTERS = {
    "appendToLocationExcludes", "clone", "createOrSet", "defaultOutputMode", "deleteIfExists",
    "enablePipelining", "exists", "from_json", "loadFromFile", "profile", "set", "toDict", "update",
    "withoutEffect", "Precision.runningStatisticsAlwaysFloat",
    "Precision.runningVarianceAlwaysFloat",
}  # fmt: skip


def fields(part: object = Spec(training=True), path: str = "") -> dict[str, object]:
    """Fields of the Spec and of its parts, by their paths."""
    found: dict[str, object] = {}
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{path}{field.name}"
        found |= fields(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return found


def test_every_field_of_the_spec_has_a_row_and_a_reader() -> None:
    """Read by its name: what reads another's, the tests of that part show."""
    rows = [value for setting in settings(Options()) for value in setting.row.values]
    named = {path for value in rows for path in (value.field, value.decides) if path}
    # The small model's tiles come from a variable; ``training`` from the wrapper; which part this
    # is from the index of the process; how many machines there are from the job.
    elsewhere = {"training", "target.tiles", "target.part", "target.hosts"}
    reached = {path for name in named for path in fields() if f"{path}.".startswith(f"{name}.")}
    assert reached | elsewhere == fields().keys()
    assert named - fields().keys() <= {path.rpartition(".")[0] for path in fields()}
    paths = [p for p in PACKAGE.rglob("*.py") if "options" not in p.relative_to(PACKAGE).parts]
    read = set(re.findall(r"\.(\w+)\b(?!\s*=[^=])", "\n".join(map(Path.read_text, paths))))
    assert {path.rpartition(".")[2] for path in fields()} <= read, "give it a reader or remove it"


def test_every_setter_has_a_row() -> None:
    rows = [setting.option for setting in settings(Options())]
    assert len(rows) == len(set(rows))
    for prefix in ("", "Training.", "Precision."):
        group = getattr(Options(), prefix[:-1]) if prefix else None
        members = vars(type(group)).items() if group else inspect.getmembers(Options)
        public = {name for name, each in members if inspect.isfunction(each) and name[0] != "_"}
        methods = {prefix + name for name in public}
        written = {name for name in rows if name.rpartition(".")[0] == prefix[:-1]}
        assert methods - NO_SETTERS == written
