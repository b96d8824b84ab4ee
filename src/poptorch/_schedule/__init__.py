"""Strategies to schedules: making them, proving them, drawing them."""

from .check import ScheduleError, check
from .draw import to_svg, to_trace
from .make import make

__all__ = ["ScheduleError", "check", "make", "to_svg", "to_trace"]
