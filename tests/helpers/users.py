"""Another user of this machine, who attacks: only root can be one."""

import functools
import os
import subprocess
import sys

import pytest

OTHER_USER = 65534
_AS_OTHER_USER = ["setpriv", f"--reuid={OTHER_USER}", f"--regid={OTHER_USER}", "--clear-groups"]


@functools.cache
def _obstacle() -> str:
    if os.getuid() != 0:
        return "only root can act as another user"
    try:
        command = [*_AS_OTHER_USER, sys.executable, "-ISc", ""]
        tried = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"setpriv cannot be run: {error}"
    return f"another user cannot run Python: {tried.stderr.strip()}" if tried.returncode else ""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Let another user run a program; skip the test, and say why, where that is impossible."""
    if _obstacle():
        pytest.skip(_obstacle())
    command = [*_AS_OTHER_USER, sys.executable, "-ISc", code, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, cwd="/", env={}, **pipes)  # type: ignore[call-overload,no-any-return]


def run(code: str, *arguments: str) -> str:
    """Let another user run a program to its end; return what it printed."""
    process = start(code, *arguments)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed
