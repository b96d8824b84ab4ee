"""The example, end to end on the small subset: both versions, their agreement, the demo's table."""

import argparse
import re

import pytest
import torch

import common
import demo
import native
import poptorch_ipu
from data import SUBSET, FashionMNIST, load
from helpers import programs
from helpers.cases import long
from helpers.closeness import near
from helpers.source_tree import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def subset() -> FashionMNIST:
    return load(SUBSET, limit=1600)


def options(*words: str) -> argparse.Namespace:
    return common.parser("").parse_args([*words])


def script(name: str, *words: str) -> str:
    """Run a script of the example as a user would and return what it printed."""
    settings = programs.with_ours(POPTORCH_BACKEND="reference")
    path = ROOT / "examples" / "fashion_mnist" / name
    run = programs.run("-W", "error", path, "--data-dir", SUBSET, *words, environment=settings)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def trained(subset: FashionMNIST) -> common.Result:
    """Two epochs of the native version: 200 steps."""
    return common.finished(native.epochs(options("--epochs", "2"), subset))


@pytest.mark.parametrize("backend", ["reference", long("inductor")])
def test_poptorch_follows_the_native_loop(trained, subset, backend, monkeypatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", backend)
    ported = common.finished(poptorch_ipu.epochs(options("--epochs", "2"), subset))
    first, second = torch.tensor(trained.losses), torch.tensor(ported.losses)
    assert second[100:].mean() < second[:100].mean()
    assert len(trained.losses) == len(ported.losses) == 200
    torch.testing.assert_close(second, first, **near(4, 200, size=0))
    assert 0.70 < trained.accuracy < 0.90  # 78 % here; 10 % is chance
    assert ported.accuracy == pytest.approx(trained.accuracy, abs=0.01)
    assert ported.compile_seconds is not None


def test_the_demo_shows_both() -> None:
    text = script("demo.py", "--limit", "320", "--epochs", "1", "--threads", "1")
    assert "Speeds are not compared: poptorch runs on the reference backend" in text
    assert re.search(r"^ +native PyTorch +poptorch$", text, re.M)
    assert re.search(r"^compile time +none +[\d.]+ s$", text, re.M)
    epoch = r"[\d.]+ it/s  loss [\d.]+"
    assert re.search(rf"^epoch 1 +{epoch} +{epoch}$", text, re.M)
    assert re.search(r"^test accuracy +[\d.]+% +[\d.]+%$", text, re.M)
    (apart,) = re.findall(r"Losses of the first 20 steps: at most (\S+) apart", text)
    assert float(apart) < 1e-4


def test_the_demo_says_how_fast_epochs_were() -> None:
    native_result = common.Result("native", [10.0, 10.0, 12.0], [0.5] * 3, [0.0] * 30)
    ours = common.Result("ours", [15.0, 35.0, 36.0], [0.5] * 3, [0.0] * 30)
    ours.tier = "runs on the inductor backend"
    text = demo.gain(native_result, ours)
    assert text.startswith("3.00 times as fast as native: median of 3 epochs that took turns")
    assert text.endswith("from 1.50 to 3.50")
