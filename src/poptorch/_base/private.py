"""Look up torch's private names, which ``private.toml`` lists, when they are used:
``private.make_fx``.

Without a required name nothing can be captured, or nothing compiled. The row of an optional name
says what does not work without it. A missing name never makes an import fail.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pkgutil
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from . import log
from .errors import Error

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
# By what does not work without them.
REQUIRED: dict[str, list[str]]
OPTIONAL: dict[str, list[str]]
REQUIRED, OPTIONAL = ({each["lost"]: each["names"] for each in _TABLES[kind].values()}
                      for kind in ("required", "optional"))  # fmt: skip
COMPILER = _TABLES["required"]["compiler"]["lost"]
CHECKPOINTS, KEPT_CODE, PRODUCTS, PACKED = (
    _TABLES["optional"][name]["lost"] for name in ("checkpoints", "kept_code", "products", "packed")
)
FORMER: dict[str, str] = _TABLES["former"]
ROWS = {path.replace(":", ".").rpartition(".")[2].lstrip("_"): (path, lost)
        for lost, paths in (REQUIRED | OPTIONAL).items() for path in paths}  # fmt: skip
ATTRIBUTES, UNDOCUMENTED = _TABLES["attributes"], _TABLES["undocumented"]
_warned_about = set[str]()  # first lines of warnings that were given


class MissingName(Error):  # noqa: N818 (as for every Error here)
    """A name that this release of torch does not have."""


def __getattr__(name: str) -> Any:
    if name not in ROWS:
        raise AttributeError(name)
    path, lost = ROWS[name]
    try:
        return pkgutil.resolve_name(_path_in_this_release(path))
    except (ImportError, AttributeError) as error:
        raise MissingName(
            f"torch {torch.__version__} has no {path.replace(':', '.')}",
            got=f"{error}; without it {lost}",
            fix=(
                "install a version of torch that this version of poptorch supports; to see the "
                'supported versions: python -c "from importlib.metadata import requires; '
                "print(requires('poptorch'))\""
            ),
        ) from error


def _path_in_this_release(path: str) -> str:
    """Return where a name is in this release of torch, if only its earlier location is
    available.
    """
    if path not in FORMER:
        return path
    try:
        pkgutil.resolve_name(path)
    except AttributeError:
        return FORMER[path]
    return path


def demand(lost: str) -> None:
    for name, (_, without_it) in ROWS.items():
        if without_it == lost:
            __getattr__(name)


def has(lost: str) -> bool:
    try:
        demand(lost)
    except MissingName as missing:
        warn_missing(missing)
        return False
    return True


def optional(name: str) -> Any:
    try:
        return __getattr__(name)
    except MissingName as missing:
        warn_missing(missing)
        return None


def keeping_versions(tensors: Iterable[Any]) -> contextlib.AbstractContextManager[None]:
    """Write to tensors within the block without changing their version counters, if torch can."""
    keeping = optional("unsafe_preserve_version_counter")
    return contextlib.nullcontext() if keeping is None else keeping(tuple(tensors))


def warn_missing(missing: MissingName) -> None:
    _warn(missing.message)


def _warn(message: str) -> None:
    first = message.partition("\n")[0]
    if first not in _warned_about:
        _warned_about.add(first)
        log.python.warning("%s", message)


def traced(
    function: Callable[..., Any],
    inputs: Any,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    **options: Any,
) -> Any:
    make_fx = __getattr__("make_fx")
    return make_fx(
        function, dict(decompositions or {}), "real", _allow_non_fake_inputs=True, **options
    )(*inputs)


@contextlib.contextmanager
def settings(chosen_values: Mapping[str, Any]) -> Iterator[None]:
    """Change settings of torch's compilers by row names. Optional settings may be missing."""
    with contextlib.ExitStack() as stack:
        for name, value in chosen_values.items():
            path, lost = ROWS[name]
            module, _, key = path.partition(":")
            try:
                __getattr__(name)
            except MissingName as missing:
                if lost in REQUIRED:
                    raise
                warn_missing(missing)
                continue
            stack.enter_context(pkgutil.resolve_name(module).patch({key: value}))
        yield


@contextlib.contextmanager
def replacing(replacements: Mapping[str, Callable[..., Any]]) -> Iterator[set[str]]:
    """Replace torch's functions by our own, unless the functions are missing or have changed.

    A replacement that accepts any arguments names those that it reads, which come first.

    Yields:
        The names that were replaced.
    """
    replaced_names = set[str]()
    with contextlib.ExitStack() as stack:
        for name, replacement in replacements.items():
            path, lost = ROWS[name]
            usual = optional(name)
            if usual is None:
                continue
            if not _takes(replacement, list(inspect.signature(usual).parameters)):
                _warn(f"torch {torch.__version__} calls {path} differently; {lost}")
                continue
            module, _, attributes = _path_in_this_release(path).partition(":")
            owners, _, attribute = attributes.rpartition(".")
            owner = pkgutil.resolve_name(f"{module}:{owners}")
            stack.enter_context(replaced(owner, attribute, replacement))
            replaced_names.add(name)
        yield replaced_names


def _takes(replacement: Callable[..., Any], names: list[str]) -> bool:
    _, *own = inspect.signature(replacement).parameters.values()
    read = [each.name for each in own if each.kind is each.POSITIONAL_OR_KEYWORD]
    return names[: len(read)] == read and (len(read) < len(own) or len(names) == len(read))


@contextlib.contextmanager
def replaced(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function or method. The new one gets the original as its first argument."""
    usual = getattr(owner, name)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)

    @functools.wraps(usual)
    def function(*arguments: Any, **options: Any) -> Any:
        return replacement(usual, *arguments, **options)

    setattr(owner, name, staticmethod(function) if is_static else function)
    try:
        yield
    finally:
        setattr(owner, name, staticmethod(usual) if is_static else usual)
