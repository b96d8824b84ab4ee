"""One job of several processes: meeting, adding up and handing round tensors, noticing losses.

Everything that travels is carried by torch.distributed (gloo); this room says where the processes
meet, what they wait for and who is to blame when they wait in vain.
"""

from . import lengths
from .facts import compare
from .group import Group, Message, current, join
from .membership import Membership, from_poprun, in_job, membership
from .place import Place, own_address, place

__all__ = [
    "Group",
    "Membership",
    "Message",
    "Place",
    "compare",
    "current",
    "from_poprun",
    "in_job",
    "join",
    "lengths",
    "membership",
    "own_address",
    "place",
]
