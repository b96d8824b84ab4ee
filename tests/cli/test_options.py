"""``poptorch options``."""

import os
from pathlib import Path

import pytest

import poptorch
from helpers import programs
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


@pytest.mark.parametrize("text, says", [
    (None, ("No such file",)),
    ("deviceIterations(3)\n\nlambda: 4\n", ("line 3 of the file",)),
    ("# a comment\ndeviceIterations('4')\n", ("line 2 of options.cfg", "Unexpected type")),
    ("nonsense(4)\n", ("line 1 of options.cfg: nonsense(4)", "Invalid attribute")),
])  # fmt: skip
def test_a_faulty_file_is_an_error_with_its_line(text, says, tmp_path: Path, capsys) -> None:
    file = tmp_path / "options.cfg"
    if text is not None:
        file.write_text(text)
    assert main(["options", str(file)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    for part in says:
        assert part in printed.err


def test_faulty_options_of_the_environment_are_named(monkeypatch, capsys) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"nonsense": 4}')
    assert main(["options"]) == 2
    assert "POPTORCH_DEFAULT_OPTIONS" in capsys.readouterr().err


def test_an_error_does_not_name_the_command_as_the_users_line(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", [__file__, "report", "nowhere"])
    assert main() == 2
    error = capsys.readouterr().err
    assert error.startswith("There is no profile to read\n  Got:    nowhere")
    assert Path(__file__).name not in error


@pytest.mark.parametrize(("words", "status", "said"), [
    (["--version"], 0, f"poptorch {poptorch.__version__}\n"), ([], 2, "command"),
])  # fmt: skip
def test_the_version_and_that_a_command_is_needed(words, status, said, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == status
    assert said in "".join(capsys.readouterr())


@pytest.mark.slow
def test_the_module_is_the_command_and_a_closed_pipe_is_silent() -> None:
    reading, writing = os.pipe()
    program = programs.Program("-m", "poptorch", "options", stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as output:
        assert output.readline().startswith("N: changes results")
    program.wait()
    assert program.errors() == ""
    program.close()
