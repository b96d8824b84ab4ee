"""Find changes on the host that a compiled program does not follow, and warn of them.

Without these checks, such a change would silently have no effect. Guards of ``torch.compile``
compare values, too, but cause a compilation; these checks only warn. All changes are in one
message, and each of them is reported once.
"""

from .captured_values import decision_check, default_type_checks, seed_checks
from .change_check import ChangeCheck, is_same, replaced_layers, shorten
from .host_weights import weights_check
from .model_structure import structure_checks
from .module_attributes import ModuleAttributes, array_check
from .periodic_checks import PeriodicChecks

__all__ = [
    "ChangeCheck",
    "ModuleAttributes",
    "PeriodicChecks",
    "array_check",
    "decision_check",
    "default_type_checks",
    "is_same",
    "replaced_layers",
    "seed_checks",
    "shorten",
    "structure_checks",
    "weights_check",
]
