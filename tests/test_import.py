"""``import poptorch`` is cheap and changes nothing around it."""

import builtins
import inspect
import json
import os
import pydoc
import subprocess
import sys

import pytest

import poptorch
from helpers.source_tree import ROOT

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
def test_import_is_light_and_changes_nothing(tmp_path) -> None:
    """In a fresh interpreter, warnings as errors; then a model is called, and graphs are known."""
    command = [sys.executable, "-W", "error", "-c", PROBE]
    how = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT / "src")}}
    run = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
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


def test_all_of_it_is_imported_without_hiding_anything_of_python_or_torch() -> None:
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
