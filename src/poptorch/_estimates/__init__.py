"""What wrapped models would cost on IPUs: estimates, advice, and tables of variants."""

from __future__ import annotations

from .estimating import Estimate, advised, estimate, of_session
from .variants import what_if

__all__ = ["Estimate", "advised", "estimate", "of_session", "what_if"]
