"""Whether another process still runs."""

from __future__ import annotations

import os


def is_running(pid: int) -> bool:
    """Tell whether there is a process of this number; one of another user's counts, too."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
