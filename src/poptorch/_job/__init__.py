"""Connect the processes of one job: their rendezvous, their exchanges over gloo, their
heartbeats.
"""

from .group import DataLength, compare, current, data_length, join, note_data_length
from .rendezvous import endpoint, from_poprun, in_job, membership, own_address
