"""Where the log goes."""

import logging

import pytest

from poptorch._base import log


@pytest.fixture
def fresh_handlers(monkeypatch):
    """Let ``setup`` run as at import, and put back what was there."""
    level = log._level
    for logger in (log.python, log.engine):
        monkeypatch.setattr(logger, "handlers", [])
    yield
    for handler in log.engine.handlers:
        handler.close()
    log.set_level(level)


@pytest.mark.usefixtures("fresh_handlers")
def test_the_engines_log_goes_to_the_file_of_the_variable(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(tmp_path / "engine.log"))
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "INFO")
    log.setup()
    log.engine.info("one line")
    log.python.info("another")
    assert "one line" in (tmp_path / "engine.log").read_text()
    assert "one line" not in capsys.readouterr().err
    assert log.engine.level == logging.INFO


@pytest.mark.usefixtures("fresh_handlers")
def test_a_file_that_cannot_be_written_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("POPTORCH_LOG_DEST", str(tmp_path / "missing" / "engine.log"))
    log.setup()
    log.engine.warning("one line")
    said = capsys.readouterr().err
    for part in ("POPTORCH_LOG_DEST cannot be written", "No such file", "one line"):
        assert part in said


def test_a_line_of_the_trace_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr(log, "_level", "TRACE")
    monkeypatch.setattr(log.engine, "level", logging.DEBUG)
    monkeypatch.setattr(log.engine, "_cache", {})  # of what is enabled: none of this level stays
    log.trace("fine %s", "grained")
    log.engine.debug("coarse")
    said = capsys.readouterr().err  # with what others have to say
    assert "[trace] fine grained" in said
    assert "[debug] coarse" in said
