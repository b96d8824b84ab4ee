"""``poptorch`` itself, and ``poptorch options``."""

import os
from pathlib import Path

import pytest

import poptorch
from helpers import programs
from poptorch._cli.main import main

Printed = pytest.CaptureFixture[str]


def test_the_table_has_the_default_options(capsys: Printed) -> None:
    status = main(["options"])

    assert status == 0
    assert "deviceIterations = 1" in capsys.readouterr().out


def test_the_table_marks_options_that_a_file_changes(tmp_path: Path, capsys: Printed) -> None:
    file = tmp_path / "options.cfg"
    file.write_text("deviceIterations(3)\n")

    main(["options", str(file)])

    assert "* N deviceIterations = 3" in capsys.readouterr().out


def test_the_table_of_all_options_is_longer(capsys: Printed) -> None:
    main(["options"])
    some = capsys.readouterr().out.splitlines()

    main(["options", "--all"])

    assert len(capsys.readouterr().out.splitlines()) > len(some)


@pytest.mark.parametrize(
    "text, says",
    [
        (None, ("No such file",)),
        ("deviceIterations(3)\n\nlambda: 4\n", ("line 3 of the file",)),
        ("# a comment\ndeviceIterations('4')\n", ("line 2 of options.cfg", "Unexpected type")),
        ("nonsense(4)\n", ("line 1 of options.cfg: nonsense(4)", "Invalid attribute")),
    ],
)
def test_a_faulty_file_is_an_error_with_its_line(
    text: str | None, says: tuple[str, ...], tmp_path: Path, capsys: Printed
) -> None:
    file = tmp_path / "options.cfg"
    if text is not None:
        file.write_text(text)
    assert main(["options", str(file)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert "Traceback" not in printed.err
    for part in says:
        assert part in printed.err


def test_faulty_options_of_the_environment_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"nonsense": 4}')

    status = main(["options"])

    assert status == 2
    assert "POPTORCH_DEFAULT_OPTIONS" in capsys.readouterr().err


def test_an_error_of_a_command_names_no_line_of_the_user(
    monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"nonsense": 4}')
    monkeypatch.setattr("sys.argv", [__file__, "report", "nowhere"])

    status = main()

    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("This path contains no profile\n  Got:    nowhere")
    assert Path(__file__).name not in error


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (["--version"], 0, f"poptorch {poptorch.__version__}\n"),
        ([], 2, "command"),
    ],
)
def test_the_version_and_that_a_command_is_needed(
    words: list[str], status: int, expected: str, capsys: Printed
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == status
    assert expected in "".join(capsys.readouterr())


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
