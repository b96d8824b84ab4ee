"""The module that integrations import the executor from."""

from .executor import PoplarExecutor

__all__ = ["PoplarExecutor"]
