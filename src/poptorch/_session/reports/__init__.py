"""Report about a running model, and capture models whose costs are estimated."""

from .captures import Captures
from .profile_reports import Reports, check_report_settings

__all__ = ["Captures", "Reports", "check_report_settings"]
