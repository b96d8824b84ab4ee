"""``estimate``: what a wrapped model would cost on IPUs. An addition to PopTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from . import _compile, _session
from ._base.errors import Error
from ._machine.estimate import Estimate
from ._machine.systems import System, parse

if TYPE_CHECKING:
    from .executor import PoplarExecutor

__all__ = ["Estimate", "estimate"]


def estimate(
    executor: PoplarExecutor, *args: Any, system: str = "bow:16", **kwargs: Any
) -> Estimate:
    """Return what a wrapped model would cost on IPUs, in memory and in time.

    The model is captured, placed and scheduled for inputs like the arguments; nothing is compiled
    and nothing runs. Its weights and the arguments may be on the ``meta`` device, so that a model
    of any size can be priced. The prices are a model's: the page "What it would cost on IPUs" says
    what they are made of, and how far off they are where it could be checked.

    Args:
        executor: from ``trainingModel`` or ``inferenceModel``.
        args, kwargs: as for a call of the executor: a combined batch.
        system: the chips: ``kind:number`` with a kind of mk1, mk2, bow, c600.

    Raises:
        poptorch.Error: there is no such system, it has fewer chips than the model needs, or the
            model cannot be captured.
    """
    return of_session(executor._session, args, kwargs, system)


def of_session(
    session: _session.Session, args: tuple[Any, ...], kwargs: Mapping[str, Any], system: str
) -> Estimate:
    """Return the estimate of a wrapped model."""
    chips = parse(system)
    captured, spec = _session.capture_for_estimate(session, args, kwargs)
    priced = _compile.estimate(captured, spec, chips)
    refuse_too_few(priced, chips)
    return priced


def refuse_too_few(priced: Estimate, chips: System) -> None:
    """Refuse a system that has fewer chips than the model needs.

    Raises:
        poptorch.Error: it has.
    """
    needed = len(priced.chips) * priced.replicas
    if needed > chips.chips:
        raise Error(
            "The model needs more IPUs than the system has",
            got=f"{priced.replicas} replicas of {len(priced.chips)} IPUs on {chips.text}",
            fix=f'system="{chips.kind.name}:{1 << (needed - 1).bit_length()}", or fewer replicas',
        )
