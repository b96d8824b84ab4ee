"""Context managers of other packages, entered while ``forward`` is captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import ClassVar

from .._base import trees

Manager = Callable[[], contextlib.AbstractContextManager[object]]


class OverwriteContextManager:
    """Holds the registered managers; ``poptorch._OverwriteContextManager``."""

    _managers: ClassVar[list[Manager]] = []

    @classmethod
    def registerSubsitutionManager(cls, manager: Manager) -> None:  # noqa: N802 (PopTorch's spelling)
        """Enter ``manager()`` around every capture from now on; once, if it is registered again."""
        if manager not in cls._managers:
            cls._managers.append(manager)

    @classmethod
    @contextlib.contextmanager
    def active(cls) -> Iterator[None]:
        """Within the block every manager is entered, in the order of registration."""
        trees.import_adapters()
        with contextlib.ExitStack() as stack:
            for manager in list(cls._managers):
                stack.enter_context(manager())
            yield
