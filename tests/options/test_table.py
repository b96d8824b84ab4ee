"""The table of options, the keys of ``_Popart`` (spec/options.md section 5.6), the progress bar."""

import dataclasses
import datetime
import inspect
import itertools
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import poptorch
from helpers.source_tree import PACKAGE
from helpers.wrapping import options
from poptorch._base import log
from poptorch._base.errors import Error
from poptorch._ir.spec import Spec
from poptorch.options import Options, progress
from poptorch.options.overview import settings
from poptorch.options.popart import KEYS, validate_popart
from poptorch.options.progress import CompilationProgressBar

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


GOOD = {
    "bool": [True], "int": [1], "float": [1.5], "string": ["text"],
    "list": [["a"], ("a", "b"), {0, 1}], "dictionary": [{"key": "value"}, {"key": True}],
}  # fmt: skip


@pytest.mark.parametrize("kind", GOOD)
def test_every_key_takes_its_type_and_no_other(kind: str) -> None:
    for key in KEYS[kind]:
        for value in GOOD[kind]:
            validate_popart({key: value})
        for other in GOOD.keys() - {kind}:
            assert key not in KEYS[other]
            said = f"(?s)Unknown {other} option: {key}.*takes a value of type {kind}"
            with pytest.raises(Error, match=said):
                validate_popart({key: GOOD[other][0]})


@pytest.mark.parametrize("key, value, phrase", [
    *(("nonsense", values[0], f"Unknown {kind} option") for kind, values in GOOD.items()),
    ("nonsense", None, "Unknown value type"), ("dotChecks", [None], "Unknown value type"),
    ("engineOptions", {1: "a"}, "Unknown value type"),
    ("autoRecomputation", 5, "out of range"), ("virtualGraphMode", -1, "out of range"),
    ("hardwareInstrumentations", [0, 2], "out of range"),
    (7, True, "Unknown bool option: 7"),
    ("outlineTreshold", 1.0, "did you mean outlineThreshold"),
])  # fmt: skip
def test_refused_settings(key, value, phrase: str) -> None:
    with pytest.raises(Error, match=phrase):
        validate_popart({key: value})


def test_the_log_directory_is_ignored_with_a_warning(caplog) -> None:
    validate_popart({"logDir": "x"})
    assert "Options.logDir" in caplog.text


def test_the_bar_users_know(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    bar = CompilationProgressBar()
    assert bar.elapsed is None
    for done in (0, 50, 100):
        bar(done, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("\rGraph compilation:   0%|")
    assert "Graph compilation: 100%|" in captured.err
    assert re.search(r"\| 100/100 \[\d\d:\d\d<00:00\]", captured.err)
    assert bar.elapsed == datetime.timedelta(seconds=2)
    bar(0, 100)  # a second compilation
    bar.close()
    assert "Graph compilation:   0%|" in capsys.readouterr().err


def test_a_line_of_the_log_stands_alone(capsys):
    bar = CompilationProgressBar()
    bar(30, 100)
    capsys.readouterr()
    log.python.warning("something")
    bar.close()
    cleared, line, again = re.split(r"(\[\d\d:.*something\n)", capsys.readouterr().err)
    assert re.fullmatch(r"\r +\r", cleared)
    assert "something" in line
    assert again.startswith("\rGraph compilation:  30%|")
    log.python.warning("the bar is closed")
    assert capsys.readouterr().err.startswith("[")


def test_a_compilation_never_goes_back_and_ends_at_all_of_it(monkeypatch):
    seen = []
    monkeypatch.setattr(CompilationProgressBar, "__call__", lambda self, share: seen.append(share))
    model = poptorch.inferenceModel(torch.nn.ReLU(), options().showCompilationProgressBar(True))
    model(torch.ones(1))
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[-1] == 100


def test_one_process_of_a_job_shows_a_bar(capsys):
    for process in (0, 1):
        opts = options().showCompilationProgressBar(True)
        opts.Distributed.configureProcessId(process, 2)
        with poptorch.inferenceModel(torch.nn.Identity(), opts)._session._progress() as progress:
            progress(0.5)
            progress(1.0)
        assert bool(capsys.readouterr().err) is not bool(process)


def test_copies_start_afresh(capsys):
    own = Options()
    own._progress_bar(10, 100)
    for other in (own.clone(), pickle.loads(pickle.dumps(own))):
        assert other._progress_bar.elapsed is None
    own._progress_bar.close()
