"""The spine: capture, build, place, schedule, compile."""

from .._place import Share
from .cache import differences, flat_fields, store_of
from .estimating import (
    Capture,
    capture_for_estimate,
    estimate,
    exchanged,
    recomputed,
    subject,
    with_fewer_checkpoints,
)
from .passes import passes_text
from .pipeline import Compiled, compile, with_stages, wrapped
from .shares import fitting, recut, shares
from .tiers import code_of
