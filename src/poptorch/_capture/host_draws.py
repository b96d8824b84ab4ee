"""Warn about random numbers of Python and NumPy in ``forward``, which are drawn only once.

The states of their generators are compared before and after the capture. During the capture, draws
are recorded with their lines: methods of ``random.Random``, which the functions of ``random`` use,
and the functions of ``numpy.random``. NumPy's generators are C code; for these, the line where
``forward`` reads the generator is reported.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .._base import log, source, syntax
from .._base.thread_safety import by_thread
from .replaced_tensors import Replacement, changed

_DRAW = ("random", "getrandbits")  # all other methods of random.Random call these
_SET = ("seed", "set_state")


@dataclass(frozen=True, eq=False)
class _Generator:
    name: str
    generator: Any
    read: Callable[[], Any]
    restore: Callable[[Any], object]
    where: str | None  # a line to use if none was recorded


class HostDraws:
    """The draws of one capture from Python's and NumPy's generators, including those in modules."""

    def __init__(self, module: nn.Module) -> None:
        self._generators = [*_global(module), *_held(module)]
        self._lines: dict[int, str | None] = {}  # for each generator, the line of its first draw
        self._seeded: set[int] = set()  # seeded by forward, so they draw the same in every run

    @contextlib.contextmanager
    def noticed(self) -> Iterator[None]:
        """Warn after the block about generators that have advanced. If the block fails,
        restore them.
        """
        before = [each.read() for each in self._generators]
        try:
            with changed([*self._changes()]):
                yield
        except BaseException:
            for each, state in zip(self._generators, before, strict=True):
                each.restore(state)
            raise
        for each, state in zip(self._generators, before, strict=True):
            if id(each.generator) not in self._seeded and _differ(each.read(), state):
                log.python.warning(
                    (
                        "forward draws random numbers from %s at %s. The program uses these "
                        "numbers as constants. To draw each time the program runs, use "
                        "torch.rand; to decide with the result, use poptorch.cond or torch.where."
                    ),
                    each.name,
                    self._lines.get(id(each.generator)) or each.where or "an unknown line",
                )

    def _changes(self) -> Iterator[Replacement]:
        for name in (*_DRAW, "seed"):
            usual = getattr(random.Random, name)
            yield random.Random, name, by_thread(self._method(usual, name), usual)
        of_module = [(random, _python()), (sys.modules.get("numpy.random"), _numpy())]
        for module, generator in of_module:
            for name, usual in list(vars(module).items()) if generator is not None else ():
                own = getattr(usual, "__self__", None) is generator or name in _SET
                if own and callable(usual):
                    noting = functools.partial(self._call, usual, name, generator)
                    yield module, name, by_thread(noting, usual)

    def _method(self, usual: Callable[..., Any], name: str) -> Callable[..., Any]:
        def method(generator: random.Random, *args: Any, **kwargs: Any) -> Any:
            return self._call(functools.partial(usual, generator), name, generator, *args, **kwargs)

        return method

    def _call(
        self, usual: Callable[..., Any], name: str, generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if name in _SET:
            self._seeded.add(id(generator))
        elif id(generator) not in self._lines:
            self._lines[id(generator)] = source.calling_line()
        return usual(*args, **kwargs)


def _differ(one: Any, two: Any) -> bool:
    # dicts that contain arrays, which == cannot compare
    return pickle.dumps(one) != pickle.dumps(two)


def _python() -> Any:
    return getattr(random.getstate, "__self__", None)


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return None if module is None else getattr(module.get_state, "__self__", None)


def _global(module: nn.Module) -> Iterator[_Generator]:
    where = source.definition_line(type(module).forward)
    yield _known("Python's random", _python(), where)
    if _numpy() is not None:
        yield _known("numpy.random", _numpy(), where)


def _held(module: nn.Module) -> Iterator[_Generator]:
    numpys = sys.modules.get("numpy.random")
    kinds = (random.Random, *((numpys.RandomState, numpys.Generator) if numpys else ()))
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, kinds):
                whole = f"{path}.{name}".lstrip(".")
                yield _known(f"the model's {whole}", value, _line_of(owner, name))


def _known(name: str, generator: Any, where: str | None) -> _Generator:
    if isinstance(generator, random.Random):
        return _Generator(name, generator, generator.getstate, generator.setstate, where)
    if hasattr(generator, "get_state"):
        read = functools.partial(generator.get_state, legacy=False)
        return _Generator(name, generator, read, generator.set_state, where)
    bits = generator.bit_generator
    restore = functools.partial(setattr, bits, "state")
    return _Generator(name, generator, lambda: bits.state, restore, where)


def _line_of(owner: nn.Module, attribute: str) -> str | None:
    """Return the first line of a module's ``forward`` that reads an attribute."""
    forward = type(owner).forward
    code = getattr(inspect.unwrap(forward), "__code__", None)
    if code is None:
        return None
    reads = (
        line
        for line, node in syntax.nodes_of(code)
        if isinstance(node, ast.Attribute) and node.attr == attribute
    )
    first = min(reads, default=None)
    if first is not None:
        return source.describe(code.co_filename, first)
    return source.definition_line(forward)
