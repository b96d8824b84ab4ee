"""Strategies to schedules: making them and proving them."""

from .check import ScheduleError, check
from .make import make

__all__ = ["ScheduleError", "check", "make"]
