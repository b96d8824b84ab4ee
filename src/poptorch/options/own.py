"""Settings that PopTorch does not have: how programs are compiled and run here."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from typing import Self

from .general import GeneralOptions
from .table import RESULTS, RULES, Value, option


class OwnOptions(GeneralOptions):
    """The backend, lanes, and programs for several kinds of inputs."""

    lane_memory: int

    @option(RESULTS, Value("backend", "auto", decides="target.backend"))
    def backend(self, name: str) -> Self:
        """Choose the backend that runs the programs; beats POPTORCH_BACKEND.

        Args:
            name: ``"auto"``: the environment's choice; without one the reference
                backend at once, and optimised code as soon as a run has lasted long enough to
                repay compiling it in the background. ``"optimise"``: optimised code from the
                first call on. ``"reference"``: operators one by one, always. Or another
                registered backend. Unknown names fail at compile.
        """

    @option(RESULTS, Value("lanes", 0, least=0, field="lanes"))
    def lanes(self, count: int) -> Self:
        """Fix how many micro-batches of a call run side by side; 0 lets the library choose.

        Args:
            count: by its own choice the library takes those of 64 rows, more where their
                intermediate values stay in the caches, within ``laneMemory``; 1 runs one
                micro-batch after another; another number is rounded down to one that divides the
                accumulation steps (in inference, the iterations) times the replicas.
        """

    @option(RESULTS, Value("lane_memory", 0, least=0, field="lane_memory"))
    def laneMemory(self, lane_memory: int) -> Self:
        """Limit the bytes of intermediate values of lanes; 0 lets the library choose.

        The library's choice is 1 GiB, halved until a quarter of the free
        memory holds it.
        """

    @option(RULES, Value("programs", 1, least=1, field="runtime.programs"))
    def programs(self, count: int) -> Self:
        """Keep the model compiled for so many kinds of inputs; the least recently used goes first.

        With 1, PopTorch's rule, inputs unlike the first call's are an error.
        With more, another batch size, length or set of arguments compiles a program of its own; all
        share weights, optimizer state and random numbers. ``train()`` and ``eval()`` do not count.
        In inference a batch that does not divide into the device iterations runs in one of them.
        """
