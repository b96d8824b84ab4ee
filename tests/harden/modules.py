"""Modules drawn from a grammar, trained or run with drawn options, compared with eager PyTorch."""

import dataclasses
import functools
import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

import poptorch
from helpers.closeness import near
from helpers.eager_loop import OPTIMIZERS, Eager, Setup, wrapped

from .parts import PARTS, SHARES, TOKENS, WIDTH, Words

Named = namedtuple("Named", "out loss")
CALLS = 2
mse, marked = F.mse_loss, functools.partial(poptorch.identity_loss, reduction="none")


@dataclasses.dataclass
class Returned:
    """The result of a model, as in other libraries."""

    loss: torch.Tensor
    logits: torch.Tensor
    cache: Any = None


def penalty(m: nn.Module) -> torch.Tensor:
    return 0.1 * sum(p.square().mean() for p in m.parameters())  # type: ignore[return-value]


def metric(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return F.l1_loss(out, y)


# By name: what forward returns, and where the loss is in that.
ENDINGS = {
    "loss": (lambda m, o, y: mse(o, y), lambda r: r),
    "both": (lambda m, o, y: (o, mse(o, y)), lambda r: r[1]),
    "penalised": (lambda m, o, y: (o, mse(o, y) + penalty(m), mse(o, y).detach()), lambda r: r[1]),
    "metric": (lambda m, o, y: {"m": metric(o, y), "l": mse(o, y), "o": o}, lambda r: r["l"]),
    "mark": (
        lambda m, o, y: [o.argmax(1), marked(o.sin().square().mean()), metric(o, y)],
        lambda r: r[1],
    ),
    "mark next to losses": (
        lambda m, o, y: (mse(o, y).detach(), (marked(mse(o, y) + penalty(m)), {"o": o.exp()})),
        lambda r: r[1][0],
    ),
    "entry": (lambda m, o, y: {"loss": mse(o, y), "parts": [F.l1_loss(o, y)]}, lambda r: r["loss"]),
    "dataclass": (lambda m, o, y: Returned(F.huber_loss(o, y), o), lambda r: r.loss),
    "named": (lambda m, o, y: Named(o.detach(), F.smooth_l1_loss(o, y)), lambda r: r.loss),
    "classes": (
        lambda m, o, y: (o.softmax(1), F.cross_entropy(o, y.argmax(1), label_smoothing=0.1)),
        lambda r: r[1],
    ),
    "two": (lambda m, o, y: (o[:, 0], mse(o, y) + 0.5 * F.l1_loss(o, y)), lambda r: r[1]),
    "a hidden one": (
        lambda m, o, y: (o, mse(o, y), (o - y).square().mean(1).detach()),
        lambda r: r[1],
    ),
}


@dataclasses.dataclass(frozen=True)
class Case(Setup):
    """A random case; ``problem(case)`` runs it again."""

    parts: tuple[tuple[str, int], ...] = ()  # each with its seed
    ending: str = "both"
    evaluated: tuple[int, ...] = ()  # parts in eval mode


class Model(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.ending = ENDINGS[case.ending][0]
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList()
        for at, (name, seed) in enumerate(case.parts):
            torch.manual_seed(seed)
            self.parts.append(PARTS[name](random.Random(seed)))
            if at in case.evaluated:
                self.parts[-1].eval()
        self.to(case.dtype)

    def forward(self, x: torch.Tensor, tokens: torch.Tensor, y: torch.Tensor) -> Any:
        x = self.first(x)
        for part in self.parts:
            x = part(x, tokens) if isinstance(part, Words) else part(x)
        return self.ending(self, x, y)


def drawn(number: int) -> Case:
    draw = random.Random(number)
    names, weights = [*PARTS], [SHARES.get(name, 1) for name in PARTS]
    count, training = draw.choice([1, 1, 2, 2, 3]), draw.random() < 0.8
    compiled = number >= 1000 and number % 50 == 0  # some of those of the long suite
    return Case(
        training,
        draw.choice([0, 0, 0, 1, 2]),
        draw.choice([1, 2, 4]) if training else 1,
        draw.choice([1, 1, 2]),
        draw.choice([1, 2]) if training else draw.choice([1, 2, 4]),
        draw.choice(["All", "All", "Final", "Sum"]),
        draw.choice(["Mean", "Mean", "Sum"]),
        draw.choice(["Post", "Running"]),
        draw.choice([*OPTIMIZERS][:5]),
        draw.choice([torch.float32, torch.float32, torch.float64]),
        "inductor" if compiled else "reference",
        parts=tuple((p, draw.randrange(1 << 20)) for p in draw.choices(names, weights, k=count)),
        ending=draw.choice([*ENDINGS]),
        evaluated=tuple(at for at in range(count) if draw.random() < 0.1),
    )


def closeness(case: Case) -> dict[str, float]:
    if any(name == "cast" for name, _ in case.parts):
        return near(8, CALLS, dtype=torch.bfloat16)
    return near(300, CALLS * case.iterations * len(case.parts), size=4.0, dtype=case.dtype)


def batches(case: Case) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(len(case.parts))
    tokens = torch.randint(TOKENS, (CALLS, case.rows, 3))
    floats = torch.randn(CALLS, 2, case.rows, WIDTH, dtype=case.dtype)
    return [(x, t, y) for (x, y), t in zip(floats, tokens, strict=True)]


def problem(case: Case) -> tuple[str, str | None]:
    given, make = batches(case), functools.partial(Model, case)
    eager, refused = Eager(make, ENDINGS[case.ending][1], case), None
    try:
        expected = [eager(*batch) for batch in given]
    except RuntimeError as error:
        refused = error
    with wrapped(make, case) as ours:
        try:
            got, state = [ours(*batch) for batch in given], ours.state()
        except Exception as error:
            if refused and isinstance(error, poptorch.Error | RuntimeError):
                return "refused", None
            return "exception", f"{type(error).__name__}: {error}"
    if refused:
        return "taken", f"eager torch refuses it: {refused}"
    pairs = {f"call {at}": pair for at, pair in enumerate(zip(got, expected, strict=True))}
    pairs |= {name: (state[name], value) for name, value in eager.state().items()}
    for name, pair in pairs.items():
        wrong = _difference_of(*pair, closeness(case))
        if wrong:
            return "other numbers than eager", f"{name}: {wrong}"
    return "right", None


def _difference_of(got: Any, expected: Any, close: dict[str, float]) -> str | None:
    flat, structure = pytree.tree_flatten(expected)
    try:
        ours = pytree.tree_leaves(got)
        assert pytree.tree_structure(got) == structure, "another structure"
        torch.testing.assert_close(ours, flat, **close, equal_nan=True, check_dtype=False)
    except AssertionError as error:
        return " ".join(str(error).split())
    return None


def simpler(case: Case) -> Iterator[Any]:
    for at in range(len(case.parts) if len(case.parts) > 1 else 0):
        kept = tuple(each - (each > at) for each in case.evaluated if each != at)
        yield replace(case, parts=case.parts[:at] + case.parts[at + 1 :], evaluated=kept)
    for field in dataclasses.fields(Case):
        if field.name != "parts" and getattr(case, field.name) != field.default:
            yield replace(case, **{field.name: field.default})


def shrunk(case: Case, outcome: str) -> Case:
    for smaller in simpler(case):
        if problem(smaller)[0] == outcome:
            return shrunk(smaller, outcome)
    return case


def trial(number: int) -> Iterator[Any]:
    case = drawn(number)
    outcome, description = problem(case)
    if description is not None:
        case = shrunk(case, outcome)
        description = f"{case}: {problem(case)[1]}"
    yield outcome, description
