"""Reports about a running model, and the captures whose costs are estimated."""

from .captures import Captures
from .reporting import Reports, check_report_settings

__all__ = ["Captures", "Reports", "check_report_settings"]
