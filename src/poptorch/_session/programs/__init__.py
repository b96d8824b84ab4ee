"""Manage the user's model and the programs compiled from it. Nothing here uses a device."""

from .grouping import make_groupable
from .model import CallMode, Model, Paths, Task
from .model_tensors import ModelTensors, check_saved, paths_of, refuse_saved
from .programs import Programs, Specialization

__all__ = [
    "CallMode",
    "Model",
    "ModelTensors",
    "Paths",
    "Programs",
    "Specialization",
    "Task",
    "check_saved",
    "make_groupable",
    "paths_of",
    "refuse_saved",
]
