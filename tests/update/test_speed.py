"""The benchmark of the compiled update of 200 weights runs."""

import importlib.util
import shutil

import pytest

from helpers.source_tree import ROOT


@pytest.fixture(scope="module")
def benchmark():
    path = ROOT / "benchmarks" / "fused_update.py"
    spec = importlib.util.spec_from_file_location("fused_update", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_form_is_timed(benchmark):
    found, _ = benchmark.compare("SGD", benchmark.OPTIMIZERS["SGD"], size=4, rounds=2)
    assert set(found) >= {"ours", "fused", "foreach"}
    assert all(seconds > 0 for seconds in found.values())
