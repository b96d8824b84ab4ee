"""The examples on real data and of graph networks: each runs, learns as eager does, draws."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch

import side_by_side
from helpers.cases import few
from helpers.closeness import near, relative
from helpers.source_tree import ROOT

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
FOLDERS = sorted(path.parent.name for path in EXAMPLES.glob("*/train.py"))
UNLIKE = ["reinforcement"]  # draws its data: test_reinforcement.py
# Half precision and twelve layers round; draws differ: an update later the runs are this far apart.
APART = {"images": 0.02, "single_cell": 0.02}


def test_the_examples_are_all_in_the_makefile_and_have_a_page() -> None:
    (listed,) = re.findall(r"^EXAMPLES := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.M)
    programs = listed.replace("\\", "").split()
    assert {f"{name}/train" for name in FOLDERS} <= set(programs)
    assert [name for name in programs if not (EXAMPLES / f"{name}.py").is_file()] == []
    for name in FOLDERS:
        page = (EXAMPLES / name / "README.md").read_text()
        assert f"python examples/{name}/train.py" in page
        assert ("](plot.png)" in page) == (EXAMPLES / name / "plot.png").is_file()


@pytest.mark.parametrize(
    "name", few([name for name in FOLDERS if name not in UNLIKE], "series", "text", "single_cell")
)
def test_it_learns_as_eager_does(name: str, tmp_path, monkeypatch) -> None:
    """With the words of the README's command, which save a picture and the weights."""
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    module = importlib.import_module(f"{name}.train")
    (trained,) = [line for line in README.splitlines() if "train.py" in line]
    _, script, *words = shlex.split(trained)
    assert (ROOT / script).is_file()
    monkeypatch.chdir(tmp_path)
    eager, wrapped = module.main(["--small", *words])
    assert len(eager.losses) == len(wrapped.losses) >= 2
    assert wrapped.losses == pytest.approx(eager.losses, rel=APART.get(name, 1e-3))
    assert wrapped.losses[-1] != wrapped.losses[0]
    assert Path("speed.png").read_bytes().startswith(b"\x89PNG")
    ours = wrapped.seconds or wrapped.speeds
    assert "too few" in side_by_side.ratio([eager, wrapped]) or len(ours) > side_by_side.FEWEST
    saved, weights = torch.load("model.pt"), wrapped.model.state_dict()
    torch.testing.assert_close(saved, weights)


def test_a_ratio_is_the_median_of_updates_after_the_first_round() -> None:
    eager, wrapped = (side_by_side.Run(name, torch.nn.Identity()) for name in ("eager", "ours"))
    eager.seconds, wrapped.seconds = [9.0, 9.0, *[6.0] * 10], [1.0, 1.0, *[2.0] * 9, 60.0]
    for run in (eager, wrapped):
        run.speeds = [1.0] * 6
    text = side_by_side.ratio([eager, wrapped])
    assert text.startswith("3.00 times as fast as eager: median of 10 updates, taking turns; ")
    assert re.search(r"between 0\.\d+ and 3\.00$", text)
    for run in (eager, wrapped):
        del run.seconds[4:], run.speeds[2:]
    assert side_by_side.ratio([eager, wrapped]).startswith("too few updates")


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
