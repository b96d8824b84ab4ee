"""One job of several processes: their rendezvous, their exchanges over gloo, their heartbeats."""

from .group import Message, ProcessGroup, compare, current, data_length, join, note_data_length
from .rendezvous import Membership, endpoint, from_poprun, in_job, membership, own_address

__all__ = [
    "Membership",
    "Message",
    "ProcessGroup",
    "compare",
    "current",
    "data_length",
    "endpoint",
    "from_poprun",
    "in_job",
    "join",
    "membership",
    "note_data_length",
    "own_address",
]  # fmt: skip
