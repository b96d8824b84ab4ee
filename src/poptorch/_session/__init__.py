"""One wrapped model: arguments, compilation, calls, weights kept in step."""

from . import host_random
from .counters import Latency, Stamps
from .files import Objects, Saved, decode, encode, packed, random_state, read, save
from .hooks import register_post_compile, register_pre_compile
from .inputs import CompiledInputs
from .loading import fill, restore, resume
from .pricing import Captures
from .proxy import ParameterProxy
from .session import Session
from .wrapping import is_wrapped, owner_of, suspend, unwrap, wrap
from .wrapping import resume as undo_suspend

__all__ = [
    "Captures",
    "CompiledInputs",
    "Latency",
    "Objects",
    "ParameterProxy",
    "Saved",
    "Session",
    "Stamps",
    "decode",
    "encode",
    "fill",
    "host_random",
    "is_wrapped",
    "owner_of",
    "packed",
    "random_state",
    "read",
    "register_post_compile",
    "register_pre_compile",
    "restore",
    "resume",
    "save",
    "suspend",
    "undo_suspend",
    "unwrap",
    "wrap",
]
