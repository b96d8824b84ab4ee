"""Waiting for what will happen, so long that no test fails because the machine is busy."""

import time
from collections.abc import Callable
from typing import Any

HANGS = 120.0  # seconds after which something hangs; how soon it came decides nothing


def eventually(condition: Callable[..., Any], seconds: float = HANGS, pause: float = 0.005) -> bool:
    """Wait until a condition holds, asked after each pause; return whether it does."""
    end = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < end:
        time.sleep(pause)
    return bool(holds)
