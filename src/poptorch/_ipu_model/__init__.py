"""What a plan would cost on IPUs: prices, memory, simulation, estimates and reports of them."""

from . import page, profile, variants
from .advice import Adviser
from .constants import Constants
from .cycles import Chip, node_cycles, value_bytes
from .estimate import Estimate
from .parts import Advice
from .pass_cost import Pass, peak_bytes
from .pricing import price
from .subject import POD, Subject
from .variants import LOCATIONS, PRECISIONS, Variant, WhatIf
from .work import work_of

__all__ = [
    "LOCATIONS",
    "POD",
    "PRECISIONS",
    "Advice",
    "Adviser",
    "Chip",
    "Constants",
    "Estimate",
    "Pass",
    "Subject",
    "Variant",
    "WhatIf",
    "node_cycles",
    "page",
    "peak_bytes",
    "price",
    "profile",
    "value_bytes",
    "variants",
    "work_of",
]
