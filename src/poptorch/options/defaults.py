"""Default values of ``Options`` (PopTorch user guide, "Options"); the groups declare their own."""

from __future__ import annotations

from typing import Any

from .._base.source import OURS
from ..enums import CommGroupType, ConnectionType, OutputMode, SyncPattern
from .strategies import PipelinedExecution


def general_defaults() -> dict[str, Any]:
    """The general values, in the order in which they are shown."""
    return {
        "replication_factor": 1,
        "input_group_size": 1,
        "input_cgt": CommGroupType.Consecutive,
        "broadcast_buffers": True,
        "device_iterations": 1,
        "log_dir": ".",
        "max_repeat_logs": 4,
        "auto_round_num_ipus": False,
        "anchored_tensors": {},
        "output_mode": int(OutputMode.Default),
        "output_return_period": 1,
        "connection_type": int(ConnectionType.Always),
        "sync_pattern": int(SyncPattern.Full),
        "available_memory_proportion": {},
        "backend": "auto",
        "lanes": 0,
        "lane_memory": 0,
    }


def private_defaults() -> dict[str, Any]:
    """The private settings, which outside code reads but ``toDict`` does not show."""
    return {
        "_execution_strategy": PipelinedExecution(),
        "_relax_optimizer_checks": False,
        "_show_compilation_progress_bar": True,
        "_module_namescope_enabled": True,
        "_source_location_excludes": [OURS, "site-packages/torch", "site-packages/poptorch"],
    }
