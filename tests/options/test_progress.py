"""The progress bar that options own (spec/runtime.md section 5)."""

import copy
import datetime
import pickle

from poptorch.options import Options
from poptorch.options.progress import CompilationProgressBar


def test_the_bar_users_know(capsys):
    bar = CompilationProgressBar()
    assert bar.elapsed is None
    for progress in (0, 50, 100):
        bar(progress, 100)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("\rGraph compilation:   0%|")
    assert "Graph compilation: 100%|" in captured.err
    assert "| 100/100 [00:00<00:00]" in captured.err
    assert bar.elapsed >= datetime.timedelta(0)


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
