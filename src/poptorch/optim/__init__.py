"""Optimizers with PopTorch's arguments; they train on the device and can also step natively."""

from .optimizer import Optimizer
from .sgd import SGD
from .variable_attributes import VariableAttributes

__all__ = ["SGD", "Optimizer", "VariableAttributes"]
