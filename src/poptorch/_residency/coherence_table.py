"""Define the coherence table: what each event transfers, and which copy is newer afterwards."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple


class Coherence(enum.Enum):
    """The state of one device's copy of a host tensor."""

    SAME = "neither: the values were equal at the last transfer"
    HOST_NEWER = "the host: another device's values have come down since"
    DEVICE_NEWER = "the device: it has trained; a read of the host brings the values down"
    DEVICE_ONLY = "the device: inference has written a buffer; no read brings it down"
    HOST_ONLY = "the host: the device has no copy"


class Event(enum.Enum):
    ATTACH = "the device gets its copies"
    CALL = "a call is about to run"
    UPDATE = "training writes the tensor"
    COUNT = "inference writes the tensor"
    READ = "somebody reads the host's tensor"
    WRITE = "somebody writes the host's tensor"
    COPY_TO_HOST = "copyWeightsToHost"
    COPY_TO_DEVICE = "copyWeightsToDevice, load_state_dict of the executor"
    OTHER_TO_HOST = "another device's values come to the host"
    DETACH = "the device goes away: detachFromDevice, destroy"


class CopyDirection(enum.Enum):
    NONE = ""
    UP = "host to device"
    DOWN = "device to host"


class Transition(NamedTuple):
    transfer: CopyDirection
    state: Coherence


def _table() -> dict[tuple[Event, Coherence], Transition]:
    none, up, down = CopyDirection.NONE, CopyDirection.UP, CopyDirection.DOWN
    same, host_newer, device_newer, device_only, host_only = Coherence
    table = {(event, state): Transition(none, state) for event in Event for state in Coherence}
    for state in (host_newer, host_only):
        table[Event.CALL, state] = Transition(up, same)
    table[Event.ATTACH, host_only] = Transition(up, same)
    for state in (same, host_newer, device_newer, device_only):
        table[Event.UPDATE, state] = Transition(none, device_newer)
        table[Event.COPY_TO_DEVICE, state] = Transition(up, same)
        table[Event.DETACH, state] = Transition(none, host_only)
    for state in (same, device_only):
        table[Event.COUNT, state] = Transition(none, device_only)
        table[Event.OTHER_TO_HOST, state] = Transition(none, host_newer)
    for state in (same, device_newer, device_only):
        table[Event.COPY_TO_HOST, state] = Transition(down, same)
    table[Event.READ, device_newer] = Transition(down, same)
    for state in (device_newer, device_only):
        table[Event.DETACH, state] = Transition(down, host_only)
    return table


TABLE: Mapping[tuple[Event, Coherence], Transition] = _table()
