"""Optimizers with PopTorch's arguments; they train on the device and can also step natively."""

from .adam import ADAM, ADAMW, Adam, AdamW
from .lamb import LAMB, LAMB_KIND
from .optimizer import Optimizer, VariableAttributes
from .rmsprop import RMSPROP, RMSprop
from .sgd import COMBINED_SGD, SGD, SGD_KIND

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

# What can be compiled; where classes derive from one another, the derived one first.
KINDS = (SGD_KIND, COMBINED_SGD, ADAMW, ADAM, RMSPROP, LAMB_KIND)
