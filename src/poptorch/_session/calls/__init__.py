"""Prepare the inputs of a call and its results: arguments, batches, sizes, output structures."""

from .inputs import Indices, Inputs, refuse_model_memory, refuse_shared_inputs, return_inputs
from .outputs import CallMoments, LastCall, Outputs
from .short_batches import (
    Emitted,
    Share,
    check_results,
    is_shorter,
    join_results,
    shares_of,
    unequal_share,
)
from .signature import Arguments, BoundArguments, Signature
from .varying_sizes import VaryingSizes, shapes_of, why_fixed

__all__ = [
    "Arguments",
    "BoundArguments",
    "CallMoments",
    "Emitted",
    "Indices",
    "Inputs",
    "LastCall",
    "Outputs",
    "Share",
    "Signature",
    "VaryingSizes",
    "check_results",
    "is_shorter",
    "join_results",
    "refuse_model_memory",
    "refuse_shared_inputs",
    "return_inputs",
    "shapes_of",
    "shares_of",
    "unequal_share",
    "why_fixed",
]
