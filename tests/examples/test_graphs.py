"""The examples of graph networks: wrapped models train as torch_geometric's own loop does."""

import importlib

import pytest
import torch

from helpers.closeness import near, relative

pytestmark = pytest.mark.slow
SHORT = ("--small", "--backend", "reference", "--updates")


@pytest.mark.parametrize("name", ["nodes", "molecules", "temporal"])
def test_both_loops_train_alike(name: str, tmp_path, capsys) -> None:
    picture = tmp_path / "picture.png"
    eager, ours = importlib.import_module(name).main([*SHORT, "8", "--plot", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(eager.losses) == len(ours.losses) == 8
    assert eager.losses[-1] < eager.losses[0]
    assert ours.losses == pytest.approx(eager.losses, rel=relative(10, 8))
    for expected, got in zip(eager.predictions, ours.predictions, strict=True):
        # With accumulation the wrapped model returns the last micro-batch, as the loop does.
        torch.testing.assert_close(got, expected, **near(100, 8, size=0.1))
    printed = capsys.readouterr().out
    assert "Losses of the first 8 updates are at most" in printed
    assert "times as long as poptorch's" in printed
