"""Everything in a module that cannot be captured, in one list rather than one error at a time."""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from .._base import source
from .._base.errors import Error
from .._base.threads import one_at_a_time
from . import micro
from .capture_context import CaptureContext
from .forward import Request, refuse_holders, run_forward
from .trace import forgetting_sources, run_recorded
from .value_reads import Uncapturable, ValueReads


@dataclass(frozen=True)
class Finding:
    what: str
    line: str | None  # the user's, described
    fatal: bool  # whether the model cannot be compiled because of it
    certain: bool  # whether it ran; else it stands on a path that the first inputs do not take
    fix: str

    def __str__(self) -> str:
        verdict = "error" if self.fatal else "note"
        doubt = "" if self.certain else ", if this line runs"
        return f"{self.line or 'unknown line'}\n    {verdict}{doubt}: {self.what}\n    {self.fix}"


class Explanation(list[Finding]):
    """What was found, in the order of execution, then of the source."""

    @property
    def fatal(self) -> list[Finding]:
        return [finding for finding in self if finding.fatal and finding.certain]

    def __str__(self) -> str:
        if not self:
            return "Nothing stands in the way of capturing this model."
        certain = any(finding.certain for finding in self)
        head = f"{len(self.fatal)} of {len(self)} findings prevent compiling this model:"
        if not certain:
            one, few = "1 finding, which matters if its line runs:", "findings, which matter if"
            head = one if len(self) == 1 else f"{len(self)} {few} their lines run:"
        return "\n".join([head, *map(str, self)])


_NUMBER_FIX = "keep it a tensor (torch.where, masks), pass it as a Python number, or poptorch.CPU"
_BRANCH_FIX = (
    "decided by the first inputs for all; torch.where and poptorch.cond decide at run time"
)
_SHAPE_FIX = "give results a fixed size: torch.where, masked_fill, x[mask] = value, topk"
_PRINT_FIX = "poptorch.ipu_print_tensor prints values each time the program runs"


def capture(request: Request) -> micro.Micro:
    """As ``micro.capture``; the error about one construct names all the others, too."""
    for structure in request.arguments.values():
        refuse_holders(structure, "An argument is an object whose tensors cannot be seen")
    try:
        return micro.capture(request)
    except Uncapturable as error:
        if request.examples is not None:
            error.message += _further(explain(request), error.message)
        raise


def _further(findings: Explanation, said: str) -> str:
    others = [finding for finding in findings.fatal if (finding.line or "") not in said]
    if not others:
        return ""
    lines = [f"{finding.what}\n      {finding.line}" for finding in others]
    count = f"{len(others)} more construct{'s' * (len(others) > 1)}"
    return "\n    ".join([f"\n  {count} of this model cannot be captured:", *lines])


@one_at_a_time()
@forgetting_sources()
def explain(request: Request) -> Explanation:
    reads = ValueReads(real=True, collect=True)
    executed = _Executed()
    findings = Explanation()

    def run(flat: list[torch.Tensor]) -> list[torch.Tensor]:
        count = len(request.state)
        leaves = {s.path: t for s, t in zip(request.state, flat[:count], strict=True)}
        trained = request.trained
        for path, leaf in leaves.items():
            leaf.requires_grad_(path in trained and leaf.is_floating_point())
        context = CaptureContext(request.training, reads=reads)
        batch = flat[count : count + len(request.batch)]
        with executed, torch.set_grad_enabled(request.training):
            return list(run_forward(request, context, batch, leaves).tensors)

    error: Exception | None = None
    try:
        with torch.random.fork_rng(devices=[]):
            run_recorded(run, micro.real_inputs(request))
    except Exception as failure:
        error = failure
    findings += _noticed(reads)
    if error is not None:
        findings.append(_raised(error))
    findings += _on_other_paths(executed, {finding.line for finding in findings})
    return findings


def search(module: nn.Module) -> Explanation:
    """List what the source of a module's own methods has of such constructs; runs nothing."""
    codes: dict[CodeType, None] = {}
    for part in module.modules():
        for cls in type(part).__mro__:
            functions = filter(inspect.isfunction, vars(cls).values())
            codes |= {f.__code__: None for f in functions}
    suspects = (
        Finding(what, source.describe(code.co_filename, line), True, False, fix)
        for code in codes
        if code.co_name != "__init__" and source.is_model_file(code.co_filename)
        for line, what, fix in _suspects(code)
    )
    return Explanation(dict.fromkeys(suspects))


def _noticed(reads: ValueReads) -> Iterator[Finding]:
    for read in dict.fromkeys(reads.forbidden):
        yield Finding(f"{read.what} needs a tensor's value", read.line, True, True, _NUMBER_FIX)
    for read in dict.fromkeys(reads.shapes):
        what = f"{read.what}: the shape of its result depends on values"
        yield Finding(what, read.line, True, True, _SHAPE_FIX)
    for read, answer in reads.branches.items():
        what = f"a branch on {read.what}, {answer} for the first inputs"
        yield Finding(what, read.line, False, True, _BRANCH_FIX)
    for line in dict.fromkeys(reads.printed):
        yield Finding("printing shows no values", line, False, True, _PRINT_FIX)


def _raised(error: Exception) -> Finding:
    raised = error.__cause__ or error
    own = isinstance(raised, Error)
    what = str(raised.args[0]) if own else f"{type(raised).__name__}: {raised}"
    fix = "mend this first; what comes after it was not looked at"
    return Finding(what, source.raising_line(raised), True, True, fix)


class _Executed:
    def __init__(self) -> None:
        self.codes: dict[CodeType, None] = {}
        self.lines: set[tuple[str, int]] = set()

    def __enter__(self) -> None:
        self._before = sys.gettrace()
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        code = frame.f_code
        if not source.is_model_file(code.co_filename):
            return None
        self.codes[code] = None
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self.lines.add((frame.f_code.co_filename, frame.f_lineno))
        return self._line


_METHODS = {"item", "tolist", "numpy"}
_SHAPES = {"nonzero", "unique", "masked_select", "unique_consecutive", "argwhere"}


def _on_other_paths(executed: _Executed, known: set[str | None]) -> Iterator[Finding]:
    for code in executed.codes:
        for line, what, fix in _suspects(code):
            place = source.describe(code.co_filename, line)
            if (code.co_filename, line) not in executed.lines and place not in known:
                yield Finding(what, place, True, False, fix)


def _suspects(code: CodeType) -> Iterator[tuple[int, str, str]]:
    try:
        text, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(text)))
    except (OSError, SyntaxError):  # typed in, or a lambda in the middle of an expression
        return
    linecache.checkcache(code.co_filename)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        line, name = first + node.lineno - 1, node.func.attr
        if name in _METHODS and len(node.args) == 0:
            yield line, f".{name}() needs a tensor's value", _NUMBER_FIX
        elif name in _SHAPES:
            yield line, f"{name}: the shape of its result depends on values", _SHAPE_FIX
