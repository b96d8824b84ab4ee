"""The bar that shows how far a compilation is."""

import datetime
import itertools
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

import poptorch
from helpers.patience import eventually
from helpers.wrapping import options
from poptorch._base import log, terminal, timing
from poptorch.options import Options, progress
from poptorch.options.progress import CompilationProgressBar


@pytest.fixture(autouse=True)
def _stderr_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.Stream, "isatty", lambda _: True)


@pytest.fixture
def _clock_advances_at_each_read(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: float(next(clock))))


@pytest.fixture
def finished_bar(
    capsys: pytest.CaptureFixture[str], _clock_advances_at_each_read: None
) -> CompilationProgressBar:
    """A bar that has gone from 0 over 50 to 100 percent, a second for each half."""
    bar = CompilationProgressBar()
    assert bar.elapsed is None
    for done in (0, 50, 100):
        bar(done, 100)
    return bar


def test_a_bar_is_written_to_the_error_stream(
    finished_bar: CompilationProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    written = capsys.readouterr()

    assert written.out == ""
    assert written.err.startswith("\rGraph compilation:   0%|")
    assert "Graph compilation: 100%|" in written.err


def test_a_finished_bar_shows_its_steps_and_its_time(
    finished_bar: CompilationProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    assert re.search(r"\| 100/100 \[\d\d:\d\d<00:00\]", capsys.readouterr().err)
    assert finished_bar.elapsed == datetime.timedelta(seconds=2)


def test_a_bar_starts_again_at_a_second_compilation(
    finished_bar: CompilationProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()

    finished_bar(0, 100)
    finished_bar.close()

    assert "Graph compilation:   0%|" in capsys.readouterr().err


@pytest.fixture
def bar_at_30_percent(capsys: pytest.CaptureFixture[str]) -> CompilationProgressBar:
    bar = CompilationProgressBar()
    bar(30, 100)
    capsys.readouterr()
    return bar


def test_a_line_of_the_log_clears_the_bar_which_comes_again_below(
    bar_at_30_percent: CompilationProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    log.python.warning("something")
    bar_at_30_percent.close()

    cleared, _, restarted = re.split(r"(\[\d\d:.*something\n)", capsys.readouterr().err)
    assert re.fullmatch(r"\r +\r", cleared)
    assert restarted.startswith("\rGraph compilation:  30%|")


def test_a_line_of_the_log_does_not_redraw_a_closed_bar(
    bar_at_30_percent: CompilationProgressBar, capsys: pytest.CaptureFixture[str]
) -> None:
    bar_at_30_percent.close()
    capsys.readouterr()

    log.python.warning("the bar is closed")

    assert re.fullmatch(r"\[.*the bar is closed\n", capsys.readouterr().err)


def written_until(capsys: pytest.CaptureFixture[str], text: str) -> str:
    """Return what another thread writes to stderr until some text is there."""
    written: list[str] = []

    def is_there() -> bool:
        written.append(capsys.readouterr().err)
        return text in "".join(written)

    eventually(is_there)
    return "".join(written)


def test_a_progress_bar_shows_the_activity_of_a_long_step(
    bar_at_30_percent: CompilationProgressBar,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "TICK", 0.01)

    with timing.named("step, graph 1 of 2"), timing.part("C++ compiler"):
        first = written_until(capsys, "C++ compiler")
    with timing.named("update, graph 2 of 2"):
        second = written_until(capsys, "update")
    bar_at_30_percent.close()

    assert "step, graph 1 of 2: C++ compiler" in first
    assert "update, graph 2 of 2" in second


@pytest.fixture
def _stderr_is_a_pipe(_stderr_is_a_terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal.Stream, "isatty", lambda _: False)
    monkeypatch.setattr(progress, "TICK", 0.01)


@pytest.mark.usefixtures("_stderr_is_a_pipe")
def test_a_pipe_gets_single_lines(capsys: pytest.CaptureFixture[str]) -> None:
    bar = CompilationProgressBar()
    bar(30, 100)
    with timing.named("step, graph 1 of 2"):
        written = written_until(capsys, "step")
    bar(100, 100)

    assert re.match(r"Graph compilation: 30% after \d+ s, step, graph 1 of 2\n", written)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"Graph compilation: 100% after \d+ s", last)


def test_a_compilation_never_goes_back_and_ends_at_100_percent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(CompilationProgressBar, "__call__", lambda _, share: seen.append(share))
    model = poptorch.inferenceModel(torch.nn.ReLU(), options().showCompilationProgressBar(True))

    model(torch.ones(1))

    assert seen == sorted(seen)
    assert len(seen) > 2
    assert seen[-1] == 100


@pytest.mark.parametrize("process, shows", [(0, True), (1, False)])
def test_only_the_first_process_of_a_job_shows_a_bar(
    process: int, shows: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    opts = options().showCompilationProgressBar(True)
    opts.Distributed.configureProcessId(process, 2)
    model = poptorch.inferenceModel(torch.nn.Identity(), opts)

    with model._session._progress() as progress:
        progress(0.5)
        progress(1.0)

    assert (capsys.readouterr().err != "") is shows


def test_copies_of_options_have_a_bar_that_has_not_started() -> None:
    own = Options()
    own._progress_bar(10, 100)

    cloned = own.clone()
    unpickled = pickle.loads(pickle.dumps(own))

    assert cloned._progress_bar.elapsed is None
    assert unpickled._progress_bar.elapsed is None
    own._progress_bar.close()
