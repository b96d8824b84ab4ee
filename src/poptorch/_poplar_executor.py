"""Provide the module from which integrations import the executor."""

from .executor import PoplarExecutor

__all__ = ["PoplarExecutor"]
