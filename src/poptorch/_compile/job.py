"""Graphs that are being compiled by processes beside this one."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from .._ir.graph import Graph
from . import helper, serial
from .code import Store
from .helper import Helper, Outcome


class Job:
    """Graphs that are being compiled.

    Args:
        graphs: by key; the first ones are ready first.
        backend: name of the builder.
        store: where the code will be.
        processes: how many at most.

    Attributes:
        outcomes: by key, how it went, and why.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self, graphs: Mapping[str, Graph], backend: str, store: Store, processes: int = 1
    ) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._helpers: list[Helper] = []
        # Given back when it is dropped, or when the interpreter ends.
        self._end = weakref.finalize(self, helper.give_back, self._helpers)
        keys = list(graphs)
        number = min(len(keys), processes)
        try:
            for at in range(number):
                self._helpers.append(helper.take(backend))
                part = {key: graphs[key] for key in keys[at::number]}
                self._helpers[-1].ask(_request(part, store))
        except BaseException:
            self._end()
            raise

    def look(self) -> bool:
        """Tell whether a graph has an outcome since the last time; never waits."""
        news = [process.look() for process in self._helpers]
        for outcomes in news:
            self.outcomes |= outcomes
        return any(news)

    @property
    def finished(self) -> bool:
        """Whether all graphs have an outcome."""
        return not any(process.busy for process in self._helpers)

    def wait(self) -> None:
        """Wait until all graphs have an outcome."""
        while not self.finished:
            helper.wait(self._helpers)
            self.look()

    def end(self) -> None:
        """End what is still running."""
        self._end()


def _request(graphs: Mapping[str, Graph], store: Store) -> dict[str, Any]:
    return {
        "store": str(store.folder),
        "threads": torch.get_num_threads(),
        "graphs": {key: serial.encode(graph) for key, graph in graphs.items()},
    }
