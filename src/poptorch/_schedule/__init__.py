"""Make schedules from execution strategies, and check them."""

from .make import make
from .schedule_check import ScheduleError, check

__all__ = ["ScheduleError", "check", "make"]
