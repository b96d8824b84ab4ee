"""The progress bar that options own."""

import copy
import datetime
import itertools
import pickle
import re
from types import SimpleNamespace

from poptorch.options import Options, progress
from poptorch.options.progress import CompilationProgressBar


def test_the_bar_users_know(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))
    bar = CompilationProgressBar()
    assert bar.elapsed is None
    for done in (0, 50, 100):
        bar(done, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("\rGraph compilation:   0%|")
    assert "Graph compilation: 100%|" in captured.err
    assert re.search(r"\| 100/100 \[\d\d:\d\d<00:00\]", captured.err)
    assert bar.elapsed == datetime.timedelta(seconds=2)


def test_a_second_compilation_opens_a_second_bar(capsys):
    bar = CompilationProgressBar()
    bar(100, 100)
    capsys.readouterr()
    bar(0, 100)
    bar.close()
    assert "Graph compilation:   0%|" in capsys.readouterr().err


def test_copies_start_afresh(capsys):
    bar = CompilationProgressBar()
    bar(10, 100)
    for other in (copy.deepcopy(bar), pickle.loads(pickle.dumps(bar))):
        assert other.elapsed is None
    bar.close()
    options = Options()
    options._progress_bar(10, 100)
    assert options.clone()._progress_bar.elapsed is None
    options._progress_bar.close()
