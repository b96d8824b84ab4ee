"""The pages and the site say what is so: Python runs, links lead somewhere, tables are current.

A block fenced as ``python`` is run on its own; one fenced as ``python continued`` goes on where the
block before it ended; one fenced as ``text printed`` is what they print; one fenced as ``python
torchrun`` is a script of two processes. Anything that is not meant to run is fenced as something
else. The stops of the walks of ARCHITECTURE.md run in their order.
"""

import gc
import importlib
import inspect
import logging
import pkgutil
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import behaviours_page
import coherence_table
import environment_table
import errors_page
import files_table
import mistakes_page
import options_table
import pictures
import poptorch
import program_kinds
import site_pages
import speed
from helpers import jobs
from helpers.programs import run as run_program
from helpers.source_tree import PACKAGE, ROOT
from helpers.wrapping import Having, Scaled, options, training
from poptorch import enums

PATTERNS = ("*.md", "docs/**/*.md", "examples/**/*.md")
PAGES = sorted(path for each in PATTERNS for path in ROOT.glob(each) if path.is_file())


@dataclass(frozen=True)
class Block:
    """One fenced block: its page, the line of its fence, its info string and its text."""

    page: str
    line: int
    info: str
    text: str


def blocks(page: str, text: str) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    assert len(re.findall(r"^```", text, re.M)) % 2 == 0, f"{page}: a block is never closed"
    found = re.finditer(r"^```(.*)\n((?:.*\n)*?)```", text, re.M)
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2].rstrip()) for m in found]


def programs(page: str, text: str) -> list[list[Block]]:
    """Return the runs of Python blocks that belong together, with what they print."""
    chains: list[list[Block]] = []
    for block in blocks(page, text):
        if block.info == "python":
            chains.append([block])
        elif block.info in ("python continued", "python torchrun", "text printed"):
            assert chains, f"{page}:{block.line}: there is no block to continue"
            chains[-1].append(block)
    return chains


def slug(heading: str) -> str:
    """Return the anchor that a heading gets on the usual forges."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", "")).replace(" ", "-")


def _without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)


def broken_links(path: Path, text: str, root: Path = ROOT) -> list[str]:
    """Return the relative links of a page that lead nowhere, anchors included."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", _without_blocks(text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or not there.is_relative_to(root):
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", _without_blocks(there.read_text()), re.M)
            if anchor not in map(slug, headings):
                broken.append(target)
    return broken


CHAINS = [c for p in PAGES for c in programs(p.relative_to(ROOT).as_posix(), p.read_text())]


# Warnings that a page is about, by the page: a part of each one's text.
WARNS: dict[str, tuple[str, ...]] = {}


# A thread of gloo that outlives the script may abort its process while Python shuts down.
THREADS_AT_THE_END = """

from pathlib import Path

print("threads at the end:", *[p.read_text() for p in Path("/proc/self/task").glob("*/comm")])
"""


def test_metadata_and_status_name_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    status = (ROOT / "docs" / "status.md").read_text()

    assert project["version"] == poptorch.__version__
    assert f"works in version {poptorch.__version__}," in status


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: f"{chain[0].page}:{chain[0].line}")
def test_python_in_the_pages_runs_without_warnings(
    chain: list[Block],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")  # no compiling: the pages are tested here
    names: dict[str, object] = {"__name__": "__main__"}
    for block in chain:
        if block.info == "text printed":
            assert capsys.readouterr().out.rstrip() == block.text
            continue
        text = "\n" * block.line + block.text  # so that a traceback shows the line of the page
        if block.info == "python torchrun":
            Path("train.py").write_text(text + THREADS_AT_THE_END)
            command = "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"
            run = run_program(*command, environment=jobs.environment())
            assert run.returncode == 0, run.stderr
            assert "[warning]" not in run.stderr
            assert run.stdout.count("threads at the end:") == 2
            assert "gloo" not in run.stdout
        else:
            exec(compile(text, str(ROOT / block.page), "exec"), names)
    names.clear()
    gc.collect()  # executors hold devices as long as they live
    assert unexpected(chain[0].page, caplog.records) == []


def unexpected(page: str, records: Sequence[logging.LogRecord]) -> list[str]:
    """Return the warnings that a page is not about."""
    warnings = [each.getMessage() for each in records if each.levelno >= logging.WARNING]
    return [each for each in warnings if not any(part in each for part in WARNS.get(page, ()))]


def test_a_warning_of_a_program_in_a_page_is_found(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.DataLoader(options(), [torch.zeros(1)], batch_size=2)

    (message,) = unexpected("docs/guide/data.md", caplog.records)

    assert "No batch will be loaded" in message


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, path.read_text()) == []


@pytest.mark.parametrize(
    "script",
    [
        behaviours_page,
        coherence_table,
        environment_table,
        errors_page,
        files_table,
        mistakes_page,
        options_table,
    ],
)
def test_pages_that_scripts_write_are_current(script: ModuleType) -> None:
    assert script.PAGE.read_text() == script.page(), f"run: python {script.__file__}"


def test_the_picture_of_the_readme_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    assert pictures.OVERVIEW.read_text() == pictures.overview(), "run: python scripts/pictures.py"


def test_kinds_of_programs_are_drawn_from_the_section_that_their_benchmark_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = ["a program", "refused", "4.0", "2.00", "refused", "1.00", "2.00", ""]
    results = tmp_path / "results.md"
    results.write_text("# Speed\n\na machine\n\n## Growth\n\ntext\n")
    monkeypatch.setattr(pictures, "RESULTS", results)

    for rounds in (3, 31):
        program_kinds.add(program_kinds.section([row], rounds), results)

    assert results.read_text().count("## Kinds of programs") == 1
    assert "--rounds 31" in results.read_text()
    assert "4.0 s" in pictures.kinds_compiling()
    steps = pictures.kinds_steps()
    assert "eager" in steps
    assert "torch.compile" not in steps


@pytest.mark.parametrize("name", pictures.PLOTS)
def test_every_plot_is_drawn_from_results_and_shown(name: str) -> None:
    assert pictures.PLOTS[name]().count("<rect") > 3
    pages = [ROOT / "docs" / page for page in ("guide/speed.md", "reference/estimates.md")]
    assert pictures.PLOTS[name]() in pictures.drawn_in("".join(page.read_text() for page in pages))


PHONE, READABLE = 400, 10  # pixels: the width of a plot, and the least size of letters


@pytest.mark.parametrize("name", pictures.PLOTS)
def test_a_plot_can_be_read_on_a_phone(name: str) -> None:
    drawn = pictures.PLOTS[name]()

    (width,) = re.findall(r'viewBox="0 0 (\d+) ', drawn)
    (letters,) = re.findall(r'font-size="(\d+)"', drawn)
    assert int(letters) * PHONE / int(width) >= READABLE


def test_names_of_a_legend_do_not_overlap_and_stay_inside() -> None:
    names = [*pictures.COLOURS]

    drawn, _ = pictures.legend(names, 4)

    places = re.findall(r'<text x="([\d.]+)" y="([\d.]+)"', drawn)
    starts = [(float(y), float(x)) for x, y in places]
    ends = [
        (y, x + pictures.LETTER * len(name)) for (y, x), name in zip(starts, names, strict=True)
    ]
    assert starts == sorted(starts)
    assert all(end < start for end, start in zip(ends, starts[1:], strict=False))
    assert all(x <= pictures.NARROW for _, x in ends)


def test_plots_show_measurements_that_are_at_most_one_release_old() -> None:
    releases = re.findall(r"^## (\d+\.\d+\.\d+)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert releases[0] == poptorch.__version__
    assert measured_with(pictures.RESULTS.read_text()) in releases[:2], "run: make bench"
    assert measured_with(speed.document({}, 2)) == releases[0]


def measured_with(results: str) -> str:
    return re.findall(r", poptorch (\S+),", results.split("\n\n")[1])[0]


def test_the_readme_fits_a_screen() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 80
    (program,) = [block for block in blocks("README.md", text) if block.info == "python"]
    assert len([line for line in program.text.splitlines() if line]) <= 15
    assert len(re.findall(r"^- \*\*\[", text, re.M)) == 4


def test_the_guide_quotes_the_example_as_it_is() -> None:
    page = (ROOT / "docs" / "guide" / "from_pytorch.md").read_text()
    folder = ROOT / "examples" / "fashion_mnist"
    native = (folder / "native.py").read_text().splitlines()
    ported = (folder / "poptorch_ipu.py").read_text().splitlines()
    diffs = [block for block in blocks("from_pytorch.md", page) if block.info == "diff"]
    assert diffs
    for block in diffs:
        for line in block.text.splitlines():
            mark, code = line[:1], line[1:]
            assert mark in " +-", f"line {block.line}: {line}"
            assert mark == "+" or code in native, f"native.py has no line {code!r}"
            assert mark == "-" or code in ported, f"poptorch_ipu.py has no line {code!r}"


def test_the_makefile_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in PAGES:
        named = set(re.findall(r"`make ([a-z-]+)`", path.read_text()))
        assert named <= targets, f"{path.name} names {named - targets}"


REFERENCE = ROOT / "docs" / "reference"
LISTED = re.findall(r"^::: (\S+)", "".join(p.read_text() for p in REFERENCE.iterdir()), re.M)
ENTRIES = set(LISTED)
MODULES = (
    "poptorch",
    "poptorch.optim",
    "poptorch.profiling",
    "poptorch.testing",
    "poptorch.autocasting",
    "poptorch_geometric",
    "poptorch_geometric.ops",
    "poptorch_geometric.cluster_loader",
    "poptorch_geometric.neighbor_loader",
    "popdist",
    "popdist.poptorch",
)
SOURCES = str(ROOT / "src")


def public() -> Iterator[Any]:
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


def docstrings() -> Iterator[tuple[str, str]]:
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


def test_every_public_name_is_documented() -> None:
    assert [name for name, text in docstrings() if not text] == []


def test_errors_by_title_and_commands_are_whole() -> None:
    page = (REFERENCE / "errors.md").read_text()
    assert "| Shape mismatch for *...* | " in page  # by a function that makes the error
    assert (
        "| A sequence is longer than all sizes of PadToSizes | `ValueError` | shorten the "
        "sequence, or add" in page
    )
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
    text, kinds = (REFERENCE / "enums.md").read_text(), set(enums.__all__)
    aliases = {name for name in kinds if getattr(enums, name).__name__ != name}
    members = r"^::: poptorch\.(\S+)\n    options: {show_if_no_docstring: true}$"
    shown = set(re.findall(members, text, re.M))
    assert shown == kinds - aliases  # without a text of its own none is shown by default


def test_every_module_and_table_has_one_row_in_architecture() -> None:
    index = (ROOT / "ARCHITECTURE.md").read_text().partition("\n## Every file\n")[2]
    listed = []
    for section in index.split("\n### ")[1:]:
        folder = section.partition("\n")[0].split("`")[1].removesuffix("/")
        above = PACKAGE.parent if (PACKAGE.parent / folder).is_dir() else PACKAGE
        listed += [above / folder / name for name in re.findall(r"^\| `(.*?)`", section, re.M)]

    paths = [path for suffix in ("py", "toml") for path in (ROOT / "src").rglob(f"*.{suffix}")]
    assert sorted(listed) == sorted(each for each in paths if each.name != "__init__.py")


def test_every_file_begins_with_a_sentence_about_it() -> None:
    paths = [
        path for folder, files in files_table.folders() for path in (*files, folder / "__init__.py")
    ]
    sentences = {path: files_table.first_paragraph(path) for path in paths}

    assert [path for path, text in sentences.items() if len(text.split()) < 3] == []
    assert [path for path, text in sentences.items() if not text.endswith((".", ":"))] == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_a_page_for_developers_names_exist(page: str) -> None:
    text = (ROOT / page).read_text().partition("\n## Every file\n")[0]
    named = {*re.findall(r"`([\w/]+\.py)\b", text)} - {"model.py"}  # a user's, in examples

    folders = ("src", "tests", "scripts")
    paths = [path.as_posix() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    missing = [each for each in named if not any(path.endswith(f"/{each}") for path in paths)]
    assert missing == []


Stop = tuple[str, str]  # file, qualified name
STOP = re.compile(r"^\d+\. `([\w/]+\.py): ([\w.]+)`", re.M)
X, Y = torch.ones(4, 3), torch.ones(4, 2)


def walks() -> dict[str, list[Stop]]:
    """Return the stops of each walk, by the words that it begins with."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    section = text.partition("\n## Three walks\n")[2].partition("\n## ")[0]
    titles = re.split(r"^\*\*(.*?)\*\*", section, flags=re.M)[1:]
    return dict(zip(titles[::2], map(STOP.findall, titles[1::2]), strict=True))


def model() -> torch.nn.Module:
    def forward(own: Having, x: torch.Tensor, y: torch.Tensor) -> Any:
        with poptorch.Block("a", ipu_id=0):
            x = own.first(x)
        with poptorch.Block("b", ipu_id=1):
            return torch.nn.functional.mse_loss(own.second(x), y)

    return Having(forward, first=torch.nn.Linear(3, 3), second=torch.nn.Linear(3, 2))


def called(action: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield the package's own functions in the order in which an action calls them."""
    calls: list[Stop] = []
    prefix = f"{PACKAGE}/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix):
            calls.append((code.co_filename.removeprefix(prefix), code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    yield from calls


def a_changed_rate() -> None:
    net = Scaled(lambda x, y: x - y.sum())
    optimizer = poptorch.optim.SGD(net.parameters(), lr=0.1)
    wrapped = poptorch.trainingModel(net, options(), optimizer)
    wrapped(X, Y)
    optimizer.param_groups[0]["lr"] = 0.2
    wrapped.setOptimizer(optimizer)
    wrapped(X, Y)


def a_placed_model() -> None:
    opts = options("staged")
    opts.setExecutionStrategy(poptorch.ShardedExecution(poptorch.Stage("a"), poptorch.Stage("b")))
    training(model(), opts)(X, Y)


ACTIONS = {
    "An input tensor": lambda: training(Scaled(torch.tanh), options(iterations=2))(X),
    "A learning rate": a_changed_rate,
    "A block's id": a_placed_model,
}


@pytest.mark.slow
@pytest.mark.parametrize("title", ACTIONS)
def test_the_stops_of_a_walk_run_in_its_order(title: str) -> None:
    assert walks().keys() == ACTIONS.keys()
    stops = walks()[title]
    assert 1 < len(stops) <= 10
    calls = called(ACTIONS[title])
    for stop in stops:
        assert stop in calls, f"{stop} is not called, or not after the stops before it"


def test_repeated_calls_of_inference_skip_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poptorch._session.host_changes.periodic_checks.CHECK_EVERY", 60.0)
    inner = torch.nn.Dropout()
    wrapped = poptorch.inferenceModel(torch.nn.Sequential(inner).eval(), options())
    assert torch.equal(wrapped(X), X)
    assert ("_session/session.py", "Session._bind") not in called(lambda: wrapped(X))
    with torch.autocast("cpu"):  # for which there is another program
        assert ("_session/session.py", "Session._bind") in called(lambda: wrapped(X))
    inner.train()  # past the wrapper
    assert not torch.equal(wrapped(X), X)
    assert ("_session/session.py", "Session._bind") not in called(lambda: wrapped(X))
    inner.forward = lambda x: X.nonsense if inner.training else x
    wrapped = poptorch.inferenceModel(torch.nn.Sequential(inner.eval()).eval(), options())
    assert torch.equal(wrapped(X), X)
    inner.train()
    for _ in range(2):
        with pytest.raises(AttributeError):  # again: the other mode's program is not for this one
            wrapped(X)
