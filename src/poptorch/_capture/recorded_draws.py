"""Record the random draws of ``forward``: from which stream each is, and whether it repeats another
one.

The state of a generator determines what it draws next. During a capture, the default generator of
this thread is one of ours. Like the user's generators, it starts from a state that nothing else
has, and every draw changes its state. Whatever torch's or the user's code does with generators
(seeding, saving, restoring, forking) is then visible at the next draw:

- If the state is the present state of a stream, it is a new draw, made each time the program runs.
- If something was drawn from the state before, the same numbers are drawn again, for example when a
  checkpoint computes activations again. The node gets the number of the original draw, and later
  its result.
- Any other state was set by ``forward`` itself. The draw is then the same in every run: a constant.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._base import private, source
from .._base.errors import Error
from .._base.nested_values import with_tensors
from .._ir.operators import Operator, call_draws, generator_of
from .._ops.dispatch import answering
from .._ops.draws import DEVICE, Draw, marked
from . import recorded_again, seeded_draws
from .recorded import body_draws
from .replaced_tensors import changed
from .trace import untraced, without_data

_ORIGINS = 0xFC62272E07BB0142  # our first seed, which no user would choose
_UNSEEDED = "draw without setting a seed: torch.rand returns new numbers each time the program runs"
_FIX = (
    "draw before forward sets the state, keep the numbers in a variable, and use the variable here",
    f"or {_UNSEEDED}",
)
_LOOP_FIX = (
    "draw before the loop or branch, and pass the numbers to it as an input",
    f"or {_UNSEEDED}",
)


class Unsettled(Exception):  # noqa: N818 (the caller captures again)
    """Forward drew from states that it may have set itself; another capture shows whether it did.

    A generator that ``forward`` makes or seeds has the same state again. The states of other
    generators have changed.
    """

    def __init__(self, generators: Sequence[torch.Generator], states: Collection[bytes]) -> None:
        super().__init__()
        self.generators, self.states = generators, states


@dataclass(frozen=True, eq=False)
class _Drawn:
    draw: Draw
    call: tuple[Any, ...]  # operator and arguments, with descriptions of tensors; () in a body
    value: torch.Tensor | None  # a copy of the result, if it has values
    after: torch.Tensor  # the state after the draw


class _Default(torch.Generator):
    """Torch's default generator: the capture's own in its thread, torch's in all others."""

    def __new__(cls, *_: torch.Generator) -> _Default:
        return super().__new__(cls)

    def __init__(self, mine: torch.Generator, others: torch.Generator) -> None:
        self._mine, self._others = mine, others
        self._thread = threading.get_ident()

    @property
    def _generator_of_this_thread(self) -> torch.Generator:
        return self._mine if threading.get_ident() == self._thread else self._others

    def get_state(self) -> torch.Tensor:
        return self._generator_of_this_thread.get_state()

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        return self._generator_of_this_thread.set_state(new_state)

    def manual_seed(self, seed: int) -> torch.Generator:
        return self._generator_of_this_thread.manual_seed(seed)

    def seed(self) -> int:
        return self._generator_of_this_thread.seed()

    def initial_seed(self) -> int:
        seed = self._generator_of_this_thread.initial_seed()
        return self._others.initial_seed() if seed >= _ORIGINS else seed


class Draws:
    """The random draws of one capture.

    Args:
        users: generators that are known to belong to the user.
        earlier: what an earlier capture of the same ``forward`` left open.
    """

    def __init__(
        self, users: Iterable[torch.Generator] = (), earlier: Unsettled | None = None
    ) -> None:
        self._earlier, self._mine = earlier, torch.Generator()
        found = [*users, *(() if earlier is None else earlier.generators)]
        self._users = [*{_key(each): each for each in found}.values()]
        # generators and the states to restore
        self._kept: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        self._origins = itertools.count(_ORIGINS)
        self.count = 0  # number of draws in each run of the program
        self._new: dict[bytes, int] = {}  # the present states of streams
        self._made: dict[bytes, _Drawn] = {}  # by the state before the draw
        self._own: set[bytes] = set()  # states from which constants were drawn
        self._defaults = (0, 0)  # keys under which user code may refer to the default generator
        self._noticing = self._in_body = False

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice this thread's draws within the block. Afterwards generators are as before."""
        self._keep(*self._users)
        for stream, each in enumerate((self._mine, *self._users), DEVICE):
            self._new[_bytes(each.manual_seed(next(self._origins)).get_state())] = stream
        default = _Default(self._mine, torch.default_generator)
        self._defaults = _key(default), _key(seeded_draws.HOST)
        places = [(owner, "default_generator", default) for owner in (torch, torch.random)]
        self._noticing = True
        try:
            with changed([*places]), answering(self._answer):
                yield
            if self._earlier is None and self._own:
                raise Unsettled([each for each, _ in self._kept.values()], self._own)
        finally:
            self._noticing = False
            for generator, state in self._kept.values():
                generator.set_state(state)

    @contextlib.contextmanager
    def in_body(self) -> Iterator[None]:
        """Treat draws within the block as those of a loop or branch, whose number is not known."""
        outer, self._in_body = self._in_body, True
        try:
            with answering(self._within) if self._noticing else contextlib.nullcontext():
                yield
        finally:
            self._in_body = outer

    def _keep(self, *generators: torch.Generator) -> None:
        for each in generators:
            self._kept.setdefault(_key(each), (each, each.get_state()))

    def _answer(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._in_body:
            return func(*args, **kwargs)
        if not isinstance(func, Operator):
            return self._called(func, args, kwargs)
        if not call_draws(func, args, kwargs):
            return recorded_again.call(func, args, kwargs)
        stream = self._stream(func, args, kwargs)
        state = _bytes(stream.get_state())
        if state in self._made:
            return self._repeated(self._made[state], stream, func, args, kwargs)
        if state in self._new:
            return self._first(state, stream, func, args, kwargs)
        return self._constant(state, stream, func, args, kwargs)

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator with bodies. If they draw, the stream advances."""
        result = func(*args, **kwargs)
        if body_draws(result):
            state = _bytes(self._mine.get_state())
            if state not in self._new:
                raise _refused(f"{func} is a loop or branch that draws random numbers", _LOOP_FIX)
            self._replace_state(state, self._mine, self._draw(str(func), state), ())
        return result

    def _within(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if not call_draws(func, args, kwargs):
            return result
        stream = self._stream(func, args, kwargs)
        state = _bytes(stream.get_state())
        if state in self._new:
            self._replace_state(state, stream, self._draw(_name(func), state), ())
        elif stream is not self._mine and self._earlier is None:
            self._keep(stream)
            self._own.add(state)
        else:
            raise _refused(f"{_name(func)} is called in a loop or branch", _LOOP_FIX)
        return result

    def _stream(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> torch.Generator:
        given: torch.Generator | None = generator_of(func, args, kwargs)
        return self._mine if given is None or _key(given) in self._defaults else given

    def _draw(self, operator: str, state: bytes) -> Draw:
        self.count += 1
        return Draw(self.count - 1, self._new[state], operator)

    def _first(
        self, state: bytes, stream: torch.Generator, func: Any, args: Any, kwargs: Any
    ) -> Any:
        draw = self._draw(_name(func), state)
        # Another generator may have been set to the state from which these numbers were drawn.
        source = None if draw.stream == DEVICE else self._users[draw.stream - 1]
        with marked(draw):
            result = func(*_from(source, args), **_from(source, kwargs))
        self._replace_state(state, stream, draw, _described(func, args, kwargs), _value(result))
        return result

    def _replace_state(
        self,
        state: bytes,
        stream: torch.Generator,
        draw: Draw,
        call: tuple[Any, ...],
        value: torch.Tensor | None = None,
    ) -> None:
        after = stream.manual_seed(next(self._origins)).get_state()
        self._new[_bytes(after)] = self._new.pop(state)
        self._made[state] = _Drawn(draw, call, value, after)

    def _repeated(
        self, drawn: _Drawn, stream: torch.Generator, func: Any, args: Any, kwargs: Any
    ) -> Any:
        if _described(func, args, kwargs) != drawn.call:
            earlier = drawn.draw.operator
            raise _refused(f"{_name(func)} draws from a state from which {earlier} drew before")
        with marked(replace(drawn.draw, line=source.calling_line())):
            result = func(*_from(None, args), **_from(None, kwargs))
        if drawn.value is not None:
            with untraced():
                result.detach().copy_(drawn.value)
        stream.set_state(drawn.after)
        return result

    def _constant(
        self, state: bytes, stream: torch.Generator, func: Any, args: Any, kwargs: Any
    ) -> Any:
        if self._earlier is not None and state not in self._earlier.states:
            raise Error(
                "forward sets the random state differently each time it runs",
                got=f"in the compiled program, {_name(func)} would draw the same numbers each time",
                where=source.calling_line(),
                fix=_UNSEEDED,
            )
        self._own.add(state)
        if stream is not self._mine:
            self._keep(stream)
        value = seeded_draws.drawn(func, args, kwargs, stream)
        if value is None and self._earlier is None and stream is not self._mine:
            return func(*args, **kwargs)
        if value is None:
            raise _refused(f"the numbers that {_name(func)} draws depend on values of tensors")
        if func._schema.is_mutable:
            return args[0].copy_(value)
        return value.clone()


def _refused(what: str, fix: tuple[str, ...] = _FIX) -> Error:
    return Error(
        "Random numbers cannot be drawn here, because forward has set the state of the random "
        "generator",
        got=what,
        where=source.calling_line(),
        fix=fix,
    )


def _bytes(state: torch.Tensor) -> bytes:
    # not an operator, because that would be traced
    return ctypes.string_at(state.data_ptr(), state.numel())


def _name(func: Any) -> str:
    return str(func.overloadpacket)


def _key(generator: torch.Generator) -> int:
    """Return the key of a generator, for which torch makes new Python objects each time."""
    return generator._cdata  # type: ignore[attr-defined, no-any-return]


def _from(source: torch.Generator | None, values: Any) -> Any:
    """Return arguments with another generator, if they contain one."""
    if isinstance(values, dict):
        return {name: _from(source, each) for name, each in values.items()}
    if isinstance(values, tuple):
        return tuple(_from(source, each) for each in values)
    return source if isinstance(values, torch.Generator) else values


def _described(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the operator, and the kinds of tensors that it gets."""

    def kind(tensor: torch.Tensor) -> Any:
        return tensor.shape, tensor.stride(), tensor.dtype

    named = {name: each for name, each in kwargs.items() if name != "generator"}
    return func.overloadpacket, with_tensors(kind, _from(None, args)), with_tensors(kind, named)


def _value(result: Any) -> torch.Tensor | None:
    if not isinstance(result, torch.Tensor) or without_data(result):
        return None
    if private.optional("disable_current_modes") is None:
        return None
    with untraced():
        return result.detach().clone()
