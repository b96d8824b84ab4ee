"""Call the other rooms in order: capture, build, place, schedule, compile."""

from .cache import differences, flat_fields, store_of
from .pipeline import CompiledModel, compile, with_stages, wrapped
from .remainder import Remainder
from .size_proof import Earlier, for_one_size
from .tiers import code_of
