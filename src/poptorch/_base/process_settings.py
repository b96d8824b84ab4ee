"""Set what is global to the process while a program runs: the number of threads, and whether freed
memory is kept.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from . import env

P = ParamSpec("P")
R = TypeVar("R")

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # glibc's malloc.h
# largest number of bytes that stay at the heap's end; glibc accepts no larger one
_KEPT = (1 << 31) - 1


def use_one() -> None:
    torch.set_num_threads(1)
    if (openmp := _openmp()) is not None:
        openmp.omp_set_max_active_levels(0)


def alone(function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function while one thread runs the operators of this thread.

    Compiled code sets its own number of threads, unless parallel regions must not be nested.
    Torch's function also sets the initial number for other threads of the process.
    """
    user, openmp = torch.get_num_threads(), _openmp()
    if openmp is None:
        torch.set_num_threads(1)
        try:
            return function(*args, **kwargs)
        finally:
            torch.set_num_threads(user)
    levels = openmp.omp_get_max_active_levels()
    try:
        openmp.omp_set_num_threads(1)
        openmp.omp_set_max_active_levels(0)
        return function(*args, **kwargs)
    finally:
        try:
            openmp.omp_set_num_threads(user)
        finally:
            openmp.omp_set_max_active_levels(levels)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None)
    return library if hasattr(library, "omp_set_max_active_levels") else None


def keep_freed_memory() -> bool:
    """Make glibc keep freed memory for the next step. Return whether it does.

    Otherwise the next step gets the same pages one fault at a time. This costs 9.3 ms instead of
    5.4 for the tutorial's CNN (8 micro-batches of 16), and 92 instead of 86 for a BERT with 4
    layers, in processor time. Large blocks also come from the heap. If each were mapped separately,
    a step of GPT-2 with 124 million weights would take 1.25 times as long, and 0.93 of the memory.
    """
    return bool(env.get("POPTORCH_KEEP_FREED_MEMORY")) and _set_thresholds()


def release_freed_memory() -> None:
    """Release what was kept when a program is removed. Other programs allocate their
    memory again.
    """
    library = ctypes.CDLL(None)
    if env.get("POPTORCH_KEEP_FREED_MEMORY") and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


@functools.cache
def _set_thresholds() -> bool:
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    return bool(library.mallopt(_TRIM_THRESHOLD, _KEPT) and library.mallopt(_MMAP_MAX, 0))
