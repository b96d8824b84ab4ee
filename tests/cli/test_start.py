"""Commands that need no torch do not import it: that takes seconds of processor time."""

import subprocess
import sys
import tomllib

import pytest

from helpers import programs
from helpers.source_tree import ROOT

CODE = """
import sys
sys.argv[0] = "a command"
import poptorch_commands
try:
    poptorch_commands.{name}()
finally:
    print("torch" in sys.modules)
"""

LIGHT = (
    "poptorch --help",
    "poptorch doctor --help",
    "poptorch estimate --help",
    "poptorch cache list --help",
    "poptorch migrate --help",
    "poptorch nonsense",
    "gc_monitor",
    "gc_monitor --json",
    "gc_info",
    "gc_info --help",
)


def ran(name: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CODE.format(name=name), *words]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("words", LIGHT)
def test_help_pages_and_lists_of_devices_do_not_import_torch(words: str) -> None:
    done = ran(*words.split())

    assert done.stdout.splitlines()[-1] == "False"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_command_that_needs_the_package_gets_all_of_it() -> None:
    """The process starts with torch, which saves seconds, and without poptorch."""
    done = programs.run("-c", CODE.format(name="poptorch"), "options")

    assert "deviceIterations = 1" in done.stdout


def test_installed_commands_start_in_the_light_module() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]

    assert scripts["poptorch"] == "poptorch_commands:poptorch"
    assert scripts["gc-monitor"] == "poptorch_commands:gc_monitor"
    assert scripts["gc-info"] == "poptorch_commands:gc_info"
