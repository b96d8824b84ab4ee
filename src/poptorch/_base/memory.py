"""How much memory there is, and whether the system may refuse it to a process that goes on running.

As Linux is usually set, it grants what is asked for and ends a process when there is none left.
Where it is limited or keeps exact accounts, asking fails, and a program can catch that.
"""

from __future__ import annotations

import functools
import os
import resource
from pathlib import Path

_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
_EXACT = "2"  # of /proc/sys/vm/overcommit_memory


def size() -> int:
    """Return the bytes of memory that this machine has, whoever uses them."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def can_be_refused() -> bool:
    """Tell whether asking for memory may fail: ``ulimit -v`` or ``-d``, exact accounting."""
    unlimited = resource.RLIM_INFINITY
    return _is_exact() or any(resource.getrlimit(kind)[0] != unlimited for kind in _LIMITS)


@functools.cache
def _is_exact() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == _EXACT
    except OSError:  # another system, or none that may be looked at
        return True
