"""Call the other packages in order: capture, build, place, schedule, compile."""

from .cache import differences, flat_fields, store_of
from .pipeline import CompiledModel, compile, with_stages, wrapped
from .plan_code import code_of
from .remainder import Remainder
from .size_proof import EarlierProgram, for_one_size
