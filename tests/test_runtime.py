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


@pytest.mark.slow
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


@pytest.mark.slow
def test_plans_and_estimates_are_tables_and_pictures() -> None:
    model = Graded(first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 4))
    poptorch.BeginBlock(model.second, "<second>", ipu_id=1)
    own = options()
    own.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(model, own)
    training.compile(X, Y)
    plan = training.plan()._repr_html_()
    assert plan.startswith("<pre>runs on")
    assert "&lt;second&gt;" in plan
    assert plan.count("<rect") > 3 * 4
    priced = training.estimate(X, Y)
    page = priced._repr_html_()
    assert "Graded, training, on mk2:64: 1 replicas of 2 IPUs" in page
    assert "<tr><th>ipu</th><th>busy</th>" in page
    assert page.count("<tr>") == 3 + 11  # IPUs and operators, with their heads
    assert all(cell in page for cell in str(priced).split() if cell.isalnum())
    table = poptorch.what_if(training, X, Y, vary={"recomputation": [True, False]})
    assert table._repr_html_().startswith("<table><tr><th>recomputation</th><th>items/s</th>")
    assert table._repr_html_().count("<tr>") == 4


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


@pytest.mark.slow
@pytest.mark.spec("geometric", 80)
def test_import_is_light_and_changes_nothing(tmp_path: Path) -> None:
    """In a fresh interpreter, warnings as errors; then a model is called, and graphs are known."""
    command = [sys.executable, "-W", "error", "-c", PROBE]
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
    run = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert run.returncode == 0
    assert run.stderr == ""
    probe = json.loads(run.stdout)
    changed = probe["changed"]
    # One variable is part of PopTorch's contract.
    if "environ" in changed:
        old, new = changed.pop("environ")
        assert new == {**old, "RDMAV_FORK_SAFE": "1"}
    assert changed == {}
    assert [name for name in probe["modules"] if name.startswith(HEAVY)] == []
    packages = {name.partition(".")[0] for name in probe["modules"]} - sys.stdlib_module_names
    assert packages == {"poptorch", "filelock", "psutil", "safetensors"}  # nothing more of torch
    # Torch names the lines of operators only once it has imported that: 17 MB, half a second.
    roots = ("torch.export", "networkx", "torch._functorch.aot_autograd")
    assert [name for name in probe["called"] if name.startswith(roots)] == []
    assert any(name.startswith("poptorch.backends") for name in probe["called"])
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
