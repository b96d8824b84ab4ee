"""Processes that hold devices, started without torch: only the pod's own modules are loaded."""

import os
import subprocess
import sys
from pathlib import Path

import poptorch

SOURCE = Path(poptorch.__file__).parent
PROLOGUE = f"""
import sys, time, types
package = types.ModuleType("poptorch")
package.__path__ = [{str(SOURCE)!r}]
sys.modules["poptorch"] = package
from poptorch import _pod
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """Start a process that runs some code with ``pod`` imported."""
    return subprocess.Popen(
        [sys.executable, "-c", PROLOGUE + code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
