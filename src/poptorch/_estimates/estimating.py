"""``estimate``: what a wrapped model would cost on IPUs. An addition to PopTorch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import _session
from .._ipu_model.estimate import Estimate
from .._systems import parse
from ..options import Options
from .advice import advice
from .repricing import Repricer, session_of

if TYPE_CHECKING:
    from ..executor import PoplarExecutor

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
    return of_session(session_of(executor, "estimate"), executor._options, args, kwargs, system)


def of_session(
    session: _session.Session,
    options: Options,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    system: str,
) -> Estimate:
    """Return the estimate of a wrapped model, with advice."""
    repricer = Repricer(session, options, args, kwargs, parse(system))
    priced = repricer.price({}, guesses=True)
    return replace(priced, advice=advice(repricer, priced))


def advised(
    session: _session.Session, options: Options, captures: _session.Captures, priced: Estimate
) -> Estimate:
    """Return the estimate of a compiled program, with advice."""
    repricer = Repricer(session, options, (), {}, parse(priced.system), captures)
    return replace(priced, advice=advice(repricer, priced))
