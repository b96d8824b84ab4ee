"""Provide optimizers with PopTorch's arguments. They train on the device and can also step on the
host.
"""

from .adam import ADAM, ADAMW, Adam, AdamW
from .lamb import LAMB, LAMB_KIND
from .optimizer import Optimizer, VariableAttributes
from .rmsprop import RMSPROP, RMSprop
from .sgd import COMBINED_SGD, SGD, SGD_KIND

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

# The kinds that can be compiled. Derived classes precede their base classes.
KINDS = (SGD_KIND, COMBINED_SGD, ADAMW, ADAM, RMSPROP, LAMB_KIND)
