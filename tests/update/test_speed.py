"""The compiled update of 200 weights beside torch's fastest built-in forms."""

import importlib.util
import shutil

import pytest

from source_tree import ROOT


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "benchmarks" / "fused_update.py"
    spec = importlib.util.spec_from_file_location("fused_update", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.parametrize("name", ["SGD", "Adam"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_beats_the_fastest_form_of_torch(benchmark, name):
    found, _ = benchmark.compare(name, benchmark.OPTIMIZERS[name], size=32, rounds=20)
    ours = found.pop("ours")
    assert ours < min(found.values()), (ours, found)
