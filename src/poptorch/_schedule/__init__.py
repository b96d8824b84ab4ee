"""Make schedules from execution strategies, and check them."""

from .check import ScheduleError, check
from .make import make

__all__ = ["ScheduleError", "check", "make"]
