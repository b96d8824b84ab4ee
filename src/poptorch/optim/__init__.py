"""Optimizers with PopTorch's arguments; they train on the device and can also step natively."""

from .adam import Adam, AdamW
from .lamb import LAMB
from .optimizer import Optimizer
from .rmsprop import RMSprop
from .sgd import SGD
from .variable_attributes import VariableAttributes

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]
