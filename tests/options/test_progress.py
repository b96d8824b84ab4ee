"""The progress bar of compiling."""

import datetime
import itertools
import pickle
import re
from types import SimpleNamespace

import torch

import poptorch
from helpers.wrapping import options
from poptorch._base import log
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
    bar(0, 100)  # a second compilation
    bar.close()
    assert "Graph compilation:   0%|" in capsys.readouterr().err


def test_a_line_of_the_log_stands_alone(capsys):
    bar = CompilationProgressBar()
    bar(30, 100)
    capsys.readouterr()
    log.python.warning("something")
    bar.close()
    cleared, line, again = re.split(r"(\[\d\d:.*something\n)", capsys.readouterr().err)
    assert re.fullmatch(r"\r +\r", cleared)
    assert "something" in line
    assert again.startswith("\rGraph compilation:  30%|")
    log.python.warning("the bar is closed")
    assert capsys.readouterr().err.startswith("[")


def test_a_compilation_never_goes_back_and_ends_at_all_of_it(monkeypatch):
    seen = []
    monkeypatch.setattr(CompilationProgressBar, "__call__", lambda self, share: seen.append(share))
    model = poptorch.inferenceModel(torch.nn.ReLU(), options().showCompilationProgressBar(True))
    model(torch.ones(1))
    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[-1] == 100


def test_one_process_of_a_job_shows_a_bar(capsys):
    for process in (0, 1):
        opts = options().showCompilationProgressBar(True)
        opts.Distributed.configureProcessId(process, 2)
        with poptorch.inferenceModel(torch.nn.Identity(), opts)._session._progress() as progress:
            progress(0.5)
            progress(1.0)
        assert bool(capsys.readouterr().err) is not bool(process)


def test_copies_start_afresh(capsys):
    own = Options()
    own._progress_bar(10, 100)
    for other in (own.clone(), pickle.loads(pickle.dumps(own))):
        assert other._progress_bar.elapsed is None
    own._progress_bar.close()
