"""The inductor backend."""

from .backend import Inductor

__all__ = ["Inductor"]
