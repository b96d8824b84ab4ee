"""Run plans with backends. ``protocol`` defines the interface for backends of other packages."""

from .._ir.backend_names import AUTO, OPTIMISE
from .protocol import (
    Backend,
    Builder,
    Code,
    Compiled,
    Executable,
    Progress,
    conditions_of,
    device_of,
)
from .stopwatch import Stopwatch, timing
