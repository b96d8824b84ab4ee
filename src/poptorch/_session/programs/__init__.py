"""The user's model, what is compiled from it, and the programs that exist. Knows no device."""

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
