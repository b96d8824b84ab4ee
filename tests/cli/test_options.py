"""``poptorch options``."""

from __future__ import annotations

from pathlib import Path

import pytest

from poptorch._cli.main import main


def test_the_table(tmp_path: Path, capsys) -> None:
    assert main(["options"]) == 0
    text = capsys.readouterr().out
    assert "deviceIterations = 1" in text
    file = tmp_path / "options.cfg"
    file.write_text("deviceIterations(3)\n")
    main(["options", str(file)])
    assert "* N deviceIterations = 3" in capsys.readouterr().out
    main(["options", "--all"])
    assert len(capsys.readouterr().out.splitlines()) > len(text.splitlines())


def test_a_command_is_needed(capsys) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "command" in capsys.readouterr().err
