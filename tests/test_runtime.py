"""The process around the library: logging, environment, what importing does."""

import builtins
import inspect
import json
import logging
import os
import pydoc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import compile_cost
import notebook_page
import poptorch
from helpers import programs
from helpers.cases import few
from helpers.source_tree import ROOT
from helpers.wrapping import Graded, inference, options
from poptorch._base import log


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own."""
    usual = programs.with_ours(**environment).items()
    kept = {name: value for name, value in usual if not name.startswith("POP")} | environment
    return programs.run("-c", code, environment=kept)


@pytest.fixture(autouse=True)
def _same_level() -> Iterator[None]:
    before = log._level
    yield
    log.set_level(before)


@pytest.mark.slow
@pytest.mark.spec("runtime", 2)
def test_an_invalid_level_fails_at_import() -> None:
    done = python("import poptorch", POPTORCH_LOG_LEVEL="LOUD")
    assert done.returncode == 1
    assert "Unknown log level: LOUD" in done.stderr


@pytest.mark.spec("runtime", 3, 4, 5)
def test_log_levels_are_names_or_numbers_and_others_are_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logging.getLogger("poptorch").setLevel(logging.CRITICAL)  # ours has a name of its own
    log.python.warning("heard")
    assert "heard" in caplog.text
    assert logging.getLogger("poptorch::python").level == logging.WARNING
    for level in ("TRACE", "TRACE_ALL", "DEBUG", "DEBUG_IR", "INFO", "WARN", "ERR", "OFF", 0, 6):
        poptorch.setLogLevel(level)
    for level in (5, 7, -1):
        with pytest.raises(ValueError, match="Invalid log level integer"):
            poptorch.setLogLevel(level)
    for name in ("debug", "LOUD", ""):
        with pytest.raises(ValueError, match="DEBUG, ERR, INFO, OFF, TRACE, TRACE_ALL, WARN"):
            poptorch.setLogLevel(name)


@pytest.mark.slow
@pytest.mark.spec("runtime", 6, 7, 20, 30)
def test_logs_go_to_stderr_without_colours() -> None:
    assert "RDMAV_FORK_SAFE" in os.environ  # set by our import, unless it was
    code = (
        "import os, sys, torch, poptorch\n"
        "assert os.environ['RDMAV_FORK_SAFE'] == '0'\n"
        "for shown, again in ((False, False), (True, False), (False, True)):\n"
        "    opts = poptorch.Options().backend('reference').showCompilationProgressBar(shown)\n"
        "    model = poptorch.inferenceModel(torch.nn.ReLU(), opts)\n"
        "    x = torch.ones(2)\n"
        "    model(x)\n"
        "    if again: model.compile(x)\n"
        "    print('done')\n"
        "    print('----', file=sys.stderr)\n"
    )
    done = python(code, RDMAV_FORK_SAFE="0")
    assert done.stdout == "done\n" * 3
    silent, shown, warned, end = done.stderr.split("----\n")
    assert silent == ""
    assert end == ""
    assert "Graph compilation: 100%" in shown
    assert "[poptorch::python] [warning] Call to compile() ignored" in warned
    assert "\033" not in warned


@pytest.mark.spec("runtime", 29)
@pytest.mark.parametrize(("limit", "shown"), [(2, 2), (None, 5)])
def test_repeated_log_lines_are_limited(
    limit: int | None, shown: int, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = poptorch.inferenceModel(torch.nn.Linear(2, 2), options().maxRepeatLogs(limit))
    with caplog.at_level(logging.DEBUG, "poptorch:cpp"):
        wrapper(torch.ones(2, 2))
        for _ in range(4):
            wrapper.copyWeightsToDevice()
    assert caplog.text.count("Writing weights from host to IPU memory") == shown


@pytest.mark.spec("runtime", 31)
def test_programs_are_written_at_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper, path = inference(torch.nn.Linear(2, 2)), tmp_path / "new" / "program.txt"
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(path))
    wrapper.compile(torch.ones(2, 2))
    assert "addmm" in path.read_text()
    wrapper.destroy()
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_FILE", str(tmp_path))
    monkeypatch.setenv("POPTORCH_EXPORT_PROTO_AS_BINARY", "1")
    wrapper.compile(torch.ones(2, 2))
    _, plan = json.loads((tmp_path / "model.proto").read_text())["value"]
    _, program = plan["program"]["value"]
    graphs = {name: graph["graph"]["nodes"] for name, graph in program["graphs"]["dict"]}
    assert [node.get("target") for node in graphs["forward"]].count("aten.addmm.default") == 1
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")  # read when compiling, too
    wrapper.destroy()
    wrapper.compile(torch.ones(2, 2))
    assert wrapper.plan().spec.target.device == "model"


MOST = 1.1  # of a committed figure; who has reasons for more writes new ones
COMMITTED = json.loads(compile_cost.COUNTS.read_text())


@pytest.mark.full("compares counts with committed ones, and starts ten processes for each")
@pytest.mark.parametrize(
    "name",
    ["mlp", *(pytest.param(name, marks=pytest.mark.long) for name in compile_cost.NAMES[1:])],
)
def test_no_part_of_compiling_grows(name: str, tmp_path: Path) -> None:
    command = [sys.executable, compile_cost.__file__, name, "--counts", "--json", tmp_path / "new"]
    subprocess.run(command, check=True, capture_output=True)
    new = json.loads((tmp_path / "new").read_text())
    if new["conditions"] != COMMITTED["conditions"]:
        pytest.skip(f"the figures are of {COMMITTED['conditions']}, not {new['conditions']}")
    for part, count in COMMITTED["counts"][name].items():
        assert new["counts"][name][part] <= MOST * count, part


NOTEBOOKS = {path.stem: path for path in notebook_page.NOTEBOOKS}
X, Y = torch.randn(12, 4), torch.randn(12, 4)


@pytest.fixture(scope="module")
def on_two_chips() -> Iterator[poptorch.PoplarExecutor]:
    """A compiled model of two layers, the second in a block whose name needs to be quoted."""
    model = Graded(first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))
    poptorch.BeginBlock(model.second, "<second>", ipu_id=1)
    opts = options()
    opts.Training.gradientAccumulation(3)
    executor = poptorch.trainingModel(model, opts)
    executor.compile(X, Y)
    yield executor
    executor.destroy()


def test_a_notebook_shows_a_plan_as_a_picture(on_two_chips: poptorch.PoplarExecutor) -> None:
    page = on_two_chips.plan()._repr_html_()

    assert page.startswith("<pre>runs on")
    assert "&lt;second&gt;" in page
    assert page.count("<rect") > 3 * 4


@pytest.mark.slow
def test_a_notebook_shows_an_estimate_as_tables(on_two_chips: poptorch.PoplarExecutor) -> None:
    estimate = on_two_chips.estimate(X, Y)

    page = estimate._repr_html_()

    assert "Graded, training, on mk2:64: 1 replica of 2 IPUs" in page
    assert "<tr><th>ipu</th><th>busy</th>" in page
    assert page.count("<tr>") == 3 + 11  # IPUs and operators, with their heads
    cells = [cell for cell in str(estimate).split() if cell.isalnum()]
    assert [cell for cell in cells if cell not in page] == []


@pytest.mark.slow
def test_a_notebook_shows_variants_as_a_table(on_two_chips: poptorch.PoplarExecutor) -> None:
    table = poptorch.what_if(on_two_chips, X, Y, vary={"recomputation": [True, False]})

    page = table._repr_html_()

    assert page.startswith("<table><tr><th>recomputation</th><th>items/s</th>")
    assert page.count("<tr>") == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", few(NOTEBOOKS, "graphs", "notebook", "port"))
def test_a_notebook_shows_its_stored_results(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    cells = notebook_page.read(NOTEBOOKS[name])
    assert notebook_page.run(cells) == cells, "run: python scripts/notebook_page.py"
    assert sum(len(cell.get("outputs", ())) for cell in cells) >= 3
    assert "False" not in "".join(map(str, cells))  # what a cell finds out is so


PROBE = """
import faulthandler, json, logging, os, signal, sys, threading, warnings
import torch
before = set(sys.modules)
state = lambda: {
    "threads": [t.name for t in threading.enumerate()],
    "cwd": os.getcwd(), "files": sorted(os.listdir()), "environ": dict(os.environ),
    "excepthook": repr(sys.excepthook), "faulthandler": faulthandler.is_enabled(),
    "signals": [repr(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
    "num_threads": torch.get_num_threads(), "rng": torch.get_rng_state().tolist(),
    "dtype": str(torch.get_default_dtype()), "root_handlers": len(logging.root.handlers),
    "call": repr(torch.nn.Module.__call__), "filters": repr(warnings.filters),
}
old = state()
import poptorch
new = state()
imported = sorted(set(sys.modules) - before)
class Net(torch.nn.Linear):
    def forward(self, x):
        return torch.nn.functional.mse_loss(super().forward(x), x)
net, options = Net(2, 2), poptorch.Options().backend("reference").showCompilationProgressBar(False)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
before = set(sys.modules)
poptorch.trainingModel(net, options, optimizer)(torch.ones(3, 2))
called = sorted(set(sys.modules) - before)
sys.modules["torch_geometric"] = None  # as if it were not installed
poptorch.registerGeometricCustomArgParsers()
del sys.modules["torch_geometric"]
warnings.simplefilter("ignore")  # what follows is not ours
from torch_geometric.data import Data
geometric = "poptorch_geometric" in sys.modules
class Doubling(torch.nn.Module):
    def forward(self, data):
        return data.x * 2
doubled = poptorch.inferenceModel(Doubling(), options)(Data(x=torch.ones(2))).tolist()
json.dump({"changed": {k: [old[k], new[k]] for k in old if old[k] != new[k]}, "modules": imported,
           "called": called, "geometric": geometric, "doubled": doubled}, sys.stdout)
"""
HEAVY = ("torch._inductor", "torch.distributed", "matplotlib", "triton")


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the output of a new interpreter that imports and calls poptorch. Warnings are
    errors.
    """
    folder = tmp_path_factory.mktemp("probe")
    command = [sys.executable, "-W", "error", "-c", PROBE]
    how = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
    run = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout)


def names_in(modules: list[str], beginnings: tuple[str, ...]) -> list[str]:
    """Return the modules whose names begin in one of these ways."""
    return [name for name in modules if name.startswith(beginnings)]


@pytest.mark.slow
def test_importing_changes_one_variable_of_the_environment(probe: dict[str, Any]) -> None:
    """That variable is part of PopTorch's contract; it may be set already."""
    changed = probe["changed"]
    old, new = changed.get("environ", [{}, {"RDMAV_FORK_SAFE": "1"}])

    assert changed.keys() <= {"environ"}
    assert new == {**old, "RDMAV_FORK_SAFE": "1"}


@pytest.mark.slow
def test_importing_does_not_import_what_is_heavy(probe: dict[str, Any]) -> None:
    assert names_in(probe["modules"], HEAVY) == []


@pytest.mark.slow
def test_importing_needs_three_packages_besides_torch(probe: dict[str, Any]) -> None:
    """Torch was imported before, and no more of torch is."""
    packages = {name.partition(".")[0] for name in probe["modules"]} - sys.stdlib_module_names

    assert packages == {"poptorch", "filelock", "psutil", "safetensors"}


@pytest.mark.slow
def test_a_call_does_not_import_how_torch_names_the_lines_of_operators(
    probe: dict[str, Any],
) -> None:
    """It takes 17 MB and half a second."""
    assert names_in(probe["called"], ("poptorch.backends",))
    assert not names_in(
        probe["called"], ("torch.export", "networkx", "torch._functorch.aot_autograd")
    )


@pytest.mark.slow
@pytest.mark.spec("geometric", 80)
def test_graphs_of_torch_geometric_are_known_without_importing_our_package_for_them(
    probe: dict[str, Any],
) -> None:
    assert not probe["geometric"]
    assert probe["doubled"] == [2.0, 2.0]


def test_a_star_import_hides_no_builtin_and_no_module() -> None:
    names: dict[str, object] = {}
    exec("from poptorch import *", names)
    del names["__builtins__"]
    assert not names.keys() & vars(builtins).keys()
    assert not [name for name, value in names.items() if inspect.ismodule(value)]
    assert names.keys() == set(poptorch.__all__)
    assert len(poptorch.__all__) == len(names)
    public = {name for name in vars(poptorch) if not name.startswith("_")}
    modules = {name for name in public if inspect.ismodule(getattr(poptorch, name))}
    assert public - modules - names.keys() == {"print"}


def test_help_begins_with_the_three_main_names() -> None:
    text = pydoc.plain(pydoc.render_doc(poptorch))
    places = [text.index(name) for name in ("trainingModel(", "inferenceModel(", "Options()")]
    assert places == sorted(places)
    assert places[-1] < text.index("PACKAGE CONTENTS")
    assert len(poptorch.__doc__.splitlines()) <= 10
    names = dir(poptorch)
    assert not [name for name in names if name.startswith("_") and name != "__version__"]
    assert {"trainingModel", "Options", "BeginBlock", "optim", "print"} <= set(names)
    assert all(hasattr(poptorch, name) for name in names)
