"""Refuse to run a program that was compiled before this process was forked, and use one thread in
such a process.
"""

from __future__ import annotations

import functools
import os

import torch

from .._base import log, process_settings, processes
from .._base.errors import StateError


def check(before: int, is_compiled: bool) -> int:
    """Return the number of forks before this process; refuse a program from before one of them."""
    forks = processes.forks
    if forks:
        _use_one_thread(forks)
    if forks != before and is_compiled:
        raise StateError(
            "The model was compiled before this process was forked",
            got=(
                f"process {os.getpid()} uses a wrapper that process {os.getppid()}, or one of "
                "its parents, has compiled"
            ),
            fix=(
                "wrap the model in the new process",
                "or start processes with multiprocessing.get_context('spawn')",
            ),
        )
    return forks


@functools.cache
def _use_one_thread(process: int) -> None:
    """Use one thread for operators in a forked process, because threads do not survive a fork."""
    if processes.fork_lost_threads and torch.get_num_threads() > 1:
        log.python.warning(
            "This process was forked from a process whose operators ran on several threads. "
            "A fork does not keep threads, so the operators run on one thread here. Fork "
            "before the first call, or use the start method 'spawn'"
        )
        process_settings.use_one()
