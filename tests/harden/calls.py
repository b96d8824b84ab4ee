"""Calls with odd arguments, first calls too: refused in words, or right; nothing has changed."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import poptorch
from poptorch._capture.failures import FORWARD
from poptorch.backends import rollback

from .models import KINDS, Subject, close, same

Change = Callable[[torch.Tensor], Any]


def _no_storage(x: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x.untyped_storage().resize_(0)
    return x


def _cycle(x: torch.Tensor) -> Any:
    cycle: list[Any] = [x]
    cycle.append(cycle)
    return cycle


def _deep(x: torch.Tensor) -> Any:
    value: Any = x
    for _ in range(2000):
        value = [value]
    return value


class Strange:
    """Cannot be compared, copied or shown."""

    def __eq__(self, other: object) -> bool:
        raise ValueError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class Sub(torch.Tensor):
    """A subclass that does nothing."""


SAME: dict[str, Change] = {  # other forms of the same values
    "a transposed copy": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "every other": lambda x: x.repeat_interleave(2, 0)[::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "channels last": lambda x: (
        x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x
    ),
    "negative view": lambda x: torch.complex(x, -x).conj().imag if x.dtype is torch.float32 else x,
    "a gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a subclass": lambda x: x.as_subclass(Sub),
    "NaN": lambda x: torch.full_like(x, float("nan")) if x.is_floating_point() else x,
    "infinite": lambda x: torch.full_like(x, float("inf")) if x.is_floating_point() else x,
    "an inference tensor": torch.inference_mode()(lambda x: x.clone()),
    "shared": lambda x: x.clone().share_memory_(),
    "from numpy": lambda x: torch.from_numpy(x.numpy().copy()),
    "odd strides": lambda x: x.contiguous().as_strided(x.shape, x.stride()),
    "ignored labels": lambda x: x if x.is_floating_point() or x.dim() != 1 else x * 0 - 100,
}
OTHER: dict[str, Change] = {
    **{str(dtype): lambda x, dtype=dtype: x.to(dtype) for dtype in (
        torch.int64, torch.int32, torch.float64, torch.float16, torch.bfloat16, torch.bool,
        torch.complex64, torch.uint8, torch.int8,
    )},
    "one row more": lambda x: torch.cat([x, x[:1]]), "no rows": lambda x: x[:0],
    "one dimension more": lambda x: x[None], "one dimension less": lambda x: x.flatten(),
    "out of range": lambda x: x + 100, "negative": lambda x: x - 1000,
    "huge": lambda x: x * 0 + (1 << 40), "a scalar": lambda x: x.flatten()[0],
    "meta": lambda x: x.to("meta"), "sparse": lambda x: x.to_sparse(),
    "compressed": lambda x: x.to_sparse_csr(),
    "oneDNN": lambda x: x.float().to_mkldnn(),
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor,
    "masked": lambda x: torch.masked.masked_tensor(x, x > 0),
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "jagged": lambda x: torch.nested.nested_tensor(list(x), layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
    "no storage": _no_storage,
    "zero tensor": lambda x: torch._efficientzerotensor(tuple(x.shape)),
    "None": lambda x: None, "text": lambda x: "text", "number": lambda x: 3,
    "class": lambda x: torch.Tensor, "function": lambda x: torch.add, "object": lambda x: object(),
    "list": lambda x: [x], "dict": lambda x: {"x": x}, "set": lambda x: {1, 2},
    "nested list": lambda x: [[x], (x, {"x": x})], "cycle": _cycle, "deep": _deep,
    "strange": lambda x: Strange(), "list of strange": lambda x: [x, Strange()],
    "array": lambda x: x.numpy(), "array of two": lambda x: np.arange(2),
    "generator": lambda x: (each for each in (x,)), "NaN alone": lambda x: float("nan"),
    "module": lambda x: torch.nn.Linear(4, 3),
}  # fmt: skip


def odd(draw: random.Random, args: tuple[Any, ...]) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    way = draw.random()
    if way < 0.1:
        return _arity(draw, args)
    table = SAME if way < 0.35 else OTHER
    name = draw.choice(sorted(table))
    leaves, structure = pytree.tree_flatten(args)
    at = draw.choice([at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)])
    leaves[at] = table[name](leaves[at])
    return name, pytree.tree_unflatten(leaves, structure), {}


def _arity(draw: random.Random, args: Any) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    ways: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
        "too few": (args[:-1], {}),
        "too many": ((*args, *args), {}),
        "a keyword self": (args, {"self": args[0]}),
        "a keyword args": (args, {"args": args[0]}),
        "a keyword xs": (args, {"xs": args[0]}),
        "a keyword twice": (args, {"x": args[0], "input": args[0], "parts": args[0]}),
        "none": ((), {}),
        "by name": (args[1:], {"x": args[0]}),
    }
    name = draw.choice(sorted(ways))
    return name, *ways[name]


CALLS = 12  # of one model


def documented(error: BaseException) -> bool:
    """Return whether an exception is ours, or comes from forward or an operator and has our
    note.
    """
    notes = getattr(error, "__notes__", ())
    ours = (FORWARD, rollback.note(0, 0))
    return isinstance(error, poptorch.Error) or any(note.startswith(ours) for note in notes)


def trial(number: int) -> Iterator[tuple[str, str]]:
    draw = random.Random(number)
    name = draw.choice(sorted(KINDS))
    subject = Subject(draw, name)
    usual = draw.random() < 0.5  # begins as it is meant to be used
    for call in range(CALLS):
        args, kwargs, what = subject.kind.batch(), dict[str, Any](), "as meant"
        if call != CALLS - 1 and (call or not usual) and draw.random() < 0.8:
            try:
                what, args, kwargs = odd(draw, args)
            except Exception:  # there is no such tensor
                continue
        outcome, problem = attempt(subject, what, args, kwargs)
        yield outcome, problem and f"{name}, {what}: {problem}"
        if problem or subject.large():
            break
    subject.wrapper.destroy()


def attempt(
    subject: Subject, what: str, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]
) -> tuple[str, str | None]:
    before = subject.state()
    try:
        got = subject.wrapper(*args, **kwargs)
    except Exception as error:
        if not documented(error):
            return "exception", f"{type(error).__name__}: {str(error)[:200]}"
        if not same(subject.state(), before):
            return "refused", f"something has changed after {type(error).__name__}"
        if what != "as meant":
            return "refused", None
        if not subject.wrapper.isCompiled():
            return "refused", f"the right call is refused: {error}"
        subject.wrapper.destroy()  # it was compiled for an odd kind
        second, problem = attempt(subject, what, args, kwargs)
        return second, problem and f"after destroy(): {problem}"
    if what != "as meant" and what not in SAME:
        subject.follow()
        return "taken", None
    try:
        expected = subject.native(args, kwargs)
    except Exception:
        subject.follow()
        return "taken", None
    if what in ("NaN", "infinite"):  # weights are no numbers from now on
        return "right", None if close(got, expected) else "other numbers than eager"
    right = close(got, expected) and all(
        map(close, subject.model.state_dict().values(), subject.eager.state_dict().values())
    )
    return "right", None if right else "other numbers than eager"
