"""The examples of graph networks: wrapped models train as torch_geometric's own loop does."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

pytest.importorskip("torch_geometric")

import comparison

pytestmark = pytest.mark.slow
SHORT = ("--small", "--backend", "reference", "--updates")


@pytest.mark.parametrize("name", ["nodes", "molecules", "temporal"])
def test_both_loops_train_alike(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    eager, ours = importlib.import_module(name).main([*SHORT, "8"])
    assert len(eager.losses) == len(ours.losses) == 8
    assert eager.losses[-1] < eager.losses[0]
    assert ours.losses == pytest.approx(eager.losses, rel=1e-5)
    for expected, got in zip(eager.predictions, ours.predictions, strict=True):
        # With accumulation the wrapped model returns the last micro-batch, as the loop does.
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    printed = capsys.readouterr().out
    assert "Losses of the first 8 updates are at most" in printed
    assert "times as long as poptorch's" in printed


def test_a_picture_is_drawn_or_says_what_it_needs(tmp_path: Path) -> None:
    runs = comparison.Run("one", [2.0, 1.0], [0.2, 0.1]), comparison.Run("two", [2.0, 1.0], [1, 1])
    args = comparison.parser("Title.", 3).parse_args(["--plot", str(tmp_path / "runs.png")])
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(SystemExit, match=r"poptorch\[examples\]"):
            comparison.settings(args)
    else:
        comparison.picture(args.plot, "Title", runs)
        assert args.plot.read_bytes().startswith(b"\x89PNG")
