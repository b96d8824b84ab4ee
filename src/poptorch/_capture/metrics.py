"""Intercept metrics of torchmetrics, whose state is on the host, where a program cannot
write it.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .._base.errors import Error
from .._base.thread_safety import by_thread
from .replaced_tensors import changed

_METHODS = frozenset({"update", "forward", "compute", "reset"})
_KINDS = ("Metric", "MetricCollection", "MetricTracker")
Method = Callable[[Any, str], Callable[..., Any]]


def intercepted(method: Method) -> contextlib.AbstractContextManager[None]:
    """Give this thread's metrics the methods that ``method`` makes, within the block.

    Metrics can be stored anywhere, and their methods are attributes of the objects. Therefore the
    look-up of attributes is intercepted.
    """
    package = sys.modules.get("torchmetrics")
    kinds = [getattr(package, name) for name in _KINDS if hasattr(package, name)]

    def look_up(metric: Any, name: str) -> Any:
        return method(metric, name) if name in _METHODS else usual(metric, name)

    name, usual = "__getattribute__", object.__getattribute__
    return changed(
        [(kind, name, by_thread(look_up, vars(kind).get(name, usual))) for kind in kinds]
    )


def refused(metric: Any, name: str) -> Callable[..., Any]:
    raise Error(
        "A metric cannot be used inside of forward",
        got=(
            f"{type(metric).__name__}.{name} would run once on the host, with tensors that "
            "have no values"
        ),
        fix=(
            (
                "return the values that the metric needs from forward, and update the metric "
                "with the results of the call"
            ),
            (
                "in a LightningModule, use Trainer(strategy=PopTorchStrategy()), which updates "
                "metrics after the step"
            ),
        ),
    )
