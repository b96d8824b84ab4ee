"""List everything in a module that cannot be captured, instead of one error at a time."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .._base import private, source, syntax
from .._base.errors import Error
from .._base.thread_safety import one_at_a_time
from . import micro_batch
from .capture_context import CaptureContext
from .forward import Request, refuse_holders, run_forward
from .inner_gradients import NeedsGradient
from .python_state import PythonState
from .trace import forgetting_sources, torchs_settings
from .value_reads import NUMBER_FIX, PRINT_FIX, SHAPE_FIX, Finding, Uncapturable, ValueReads


class Explanation(list[Finding]):
    """Findings in the order of execution, and then in the order of the source."""

    @property
    def fatal(self) -> list[Finding]:
        return [finding for finding in self if finding.fatal and finding.certain]

    def __str__(self) -> str:
        if not self:
            return "Nothing prevents capturing this model."
        certain = any(finding.certain for finding in self)
        head = f"{len(self.fatal)} of {len(self)} findings prevent compiling this model:"
        if not certain:
            one, few = (
                "1 finding, which is relevant if its line runs:",
                "findings, which are relevant if",
            )
            head = one if len(self) == 1 else f"{len(self)} {few} their lines run:"
        return "\n".join([head, *map(str, self)])


_RAISED_FIX = "correct this first; the code after it was not analysed"
_BRANCH_FIX = (
    "the first inputs decide for all later ones; to decide at run time, use torch.where or "
    "poptorch.cond"
)


def capture(request: Request, before: PythonState | None = None) -> micro_batch.Micro:
    """Capture like ``micro_batch.capture``. The error about one construct also lists all others."""
    for structure in request.arguments.values():
        refuse_holders(
            structure.constants, ("An argument is an object whose tensors cannot be found")
        )
    try:
        return micro_batch.capture(request, before)
    except Uncapturable as error:
        fatal = [] if request.examples is None else explain(request).fatal
        others = [finding for finding in fatal if (finding.line or "") not in error.message]
        if others:
            count = f"{len(others)} more construct{'s' * (len(others) > 1)}"
            error.message += f"\n  {count} of this model cannot be captured:"
        for finding in others:
            error.message += f"\n    {finding.what}\n      {finding.line}"
        raise


@one_at_a_time()
@forgetting_sources()
def explain(request: Request) -> Explanation:
    try:
        return _explained(request)
    except NeedsGradient:
        return _explained(replace(request, differentiates=True))


def _explained(request: Request) -> Explanation:
    reads = ValueReads(real=True, state=micro_batch.constant_state(request), collect=True)
    codes: dict[CodeType, None] = {}
    lines: set[tuple[str, int]] = set()

    def note(frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not source.is_model_file(code.co_filename):
            return None
        codes[code] = None
        lines.add((code.co_filename, frame.f_lineno))
        return note

    def run(flat: list[torch.Tensor]) -> list[torch.Tensor]:
        count = len(request.state)
        leaves = {s.path: t for s, t in zip(request.state, flat[:count], strict=True)}
        for path, leaf in leaves.items():
            leaf.requires_grad_(path in request.trained and leaf.is_floating_point())
        context = CaptureContext(request.training, request.differentiates, reads=reads)
        batch = flat[count : count + len(request.batch)]
        before = sys.gettrace()
        sys.settrace(note)
        try:
            with torch.set_grad_enabled(request.training or request.differentiates):
                return list(run_forward(request, context, batch, leaves).tensors)
        finally:
            sys.settrace(before)

    errors = []
    try:
        with torch.random.fork_rng(devices=[]), torchs_settings():
            private.traced(run, [micro_batch.real_inputs(request)])
    except Exception as error:
        raised = error.__cause__ or error
        own = isinstance(raised, Error)
        what = str(raised.args[0]) if own else f"{type(raised).__name__}: {raised}"
        errors.append(Finding(what, source.raising_line(raised), True, True, _RAISED_FIX))
    for (question, question_line), answer in reads.branches.items():
        title = f"a branch on {question}, {answer} for the first inputs"
        reads.findings.append(Finding(title, question_line, False, True, _BRANCH_FIX))
    kinds = (NUMBER_FIX, SHAPE_FIX, _BRANCH_FIX, PRINT_FIX)
    noticed = sorted(dict.fromkeys(reads.findings), key=lambda finding: kinds.index(finding.fix))
    findings = Explanation([*noticed, *errors])
    known = {finding.line for finding in findings}
    for code in codes:
        for line, suspect in _suspects(code):
            if (code.co_filename, line) not in lines and suspect.line not in known:
                findings.append(suspect)
    return findings


def search(module: nn.Module) -> Explanation:
    """List constructs in the source of a module's own methods that cannot be captured, without
    running it.
    """
    codes: dict[CodeType, None] = {}
    for part in module.modules():
        for cls in type(part).__mro__:
            functions = filter(inspect.isfunction, vars(cls).values())
            codes |= {f.__code__: None for f in functions}
    own = (c for c in codes if c.co_name != "__init__" and source.is_model_file(c.co_filename))
    return Explanation(dict.fromkeys(suspect for code in own for _, suspect in _suspects(code)))


_METHODS = {"item", "tolist", "numpy"}
_SHAPES = {"nonzero", "unique", "masked_select", "unique_consecutive", "argwhere"}


def _suspects(code: CodeType) -> Iterator[tuple[int, Finding]]:
    linecache.checkcache(code.co_filename)
    for line, node in syntax.nodes_of(code):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        name = node.func.attr
        if name in _METHODS and len(node.args) == 0:
            what, fix = f".{name}() needs a tensor's value", NUMBER_FIX
        elif name in _SHAPES:
            what, fix = f"{name}: the shape of its result depends on values", SHAPE_FIX
        else:
            continue
        yield line, Finding(what, source.describe(code.co_filename, line), True, False, fix)
