"""Manage the device's copies of weights, buffers and state, and when they are copied."""

from .store import DEVICE_ONLY, StateLayout, StateStore
from .transfers import Transfers

__all__ = ["DEVICE_ONLY", "StateLayout", "StateStore", "Transfers"]
