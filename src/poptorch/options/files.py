"""Read and write configuration files and JSON. Option calls are parsed as data and never
executed.
"""

from __future__ import annotations

import ast
import enum
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch

from .. import enums
from .._base.errors import InvalidAttribute, InvalidValue
from . import locations, strategies
from .option_table import OptionSetting, PopartKey, Private, Value, show
from .overview import settings

_PRIVATE_GROUPS = ("_Popart", "_popart")
_MODULES = ("poptorch", "torch")
_DEEPEST = 100  # maximum depth of the syntax tree; option calls have a depth of about ten
_UNDERSTOOD = (
    *(ast.Call, ast.Attribute, ast.Name, ast.keyword, ast.expr_context),
    *(ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Constant, ast.UnaryOp, ast.unaryop),
)
_CONSTRUCTORS: dict[str, Callable[..., Any]] = {
    cls.__name__: cls
    for cls in (
        locations.TensorLocationSettings,
        strategies.Stage,
        strategies.Phase,
        strategies.PipelinedExecution,
        strategies.ShardedExecution,
        strategies.SerialPhasedExecution,
        strategies.ParallelPhasedExecution,
    )
}
_ENUMS: dict[str, type[enum.Enum]] = {
    name: value
    for name, value in vars(enums).items()
    if isinstance(value, type) and issubclass(value, enum.Enum)
}


_JSON = 'for example {"deviceIterations": 4, "Training.gradientAccumulation": 8}'
_ALLOWED = "write calls of option setters, with numbers, texts, enums and torch dtypes as arguments"


class ConfigFileError(Exception):
    """A configuration file contains something that is not an option call."""


def apply_calls(options: Any, text: str, name: str = "the options") -> None:
    """Apply the option calls in a text. Line numbers in errors count effective lines, as
    in PopTorch.
    """
    calls: list[tuple[str, ast.Call]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        statement = line.strip()
        if not statement or statement.startswith("#"):
            continue
        try:
            calls.append((f"line {number} of {name}: {statement}", _parse(statement)))
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            detail = error.msg if isinstance(error, SyntaxError) else str(error)
            raise ConfigFileError(
                f"SyntaxError at line {len(calls) + 1} of {name}: {detail} "
                f"(line {number} of the file)\n> {statement}"
            ) from error
    for place, call in calls:
        try:
            _value(call, options)
        except Exception as error:
            error.add_note(place)
            raise


def apply_data(options: Any, text: str) -> None:
    """Apply what ``as_calls`` returned. Anybody may have changed it, so only setters are called."""
    rows = ((setting, value) for setting in settings(options) for value in setting.row.values)
    known = {_setter(setting, value) for setting, value in rows if not value.here}
    for line in text.splitlines():
        try:
            name = ast.unparse(ast.parse(f"options.{line}", mode="eval").body.func)  # type: ignore[attr-defined]
        except (SyntaxError, ValueError, RecursionError, AttributeError) as error:
            raise ConfigFileError(f"this line is not an option call: {line}") from error
        if name.removeprefix("options.") not in known:
            raise ConfigFileError(f"there is no such option: {name}")
    apply_calls(options, text)


def as_calls(options: Any) -> str:
    """Return lines for ``apply_calls`` that set the same values, except those about this
    machine.
    """
    lines: dict[str, None] = {}  # ordered, without duplicates
    for setting in settings(options):
        for value in setting.row.values:
            if not value.here and value.changed(setting.group):
                lines[_call_text(setting, value)] = None
    return "\n".join(lines)


def _setter(setting: OptionSetting, value: Value) -> str:
    if isinstance(value, PopartKey):
        return "_Popart.set"
    if isinstance(value, Private):
        return setting.option
    prefix = setting.option.rpartition(".")[0]
    return f"{prefix and prefix + '.'}createOrSet"


def _call_text(setting: OptionSetting, value: Value) -> str:
    stored, setter = value.read(setting.group), _setter(setting, value)
    if isinstance(value, PopartKey):
        return f"{setter}({value.name!r}, {_text(setting.group._popart.options[value.name])})"
    if isinstance(value, Private):
        takes = len(inspect.signature(getattr(setting.group, setting.row.option)).parameters)
        return f"{setter}({_text(stored) if takes else ''})"
    return f"{setter}({value.name}={_text(stored)})"


def _text(value: Any) -> str:
    tree = ast.parse(show(value), mode="eval")
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = f"poptorch.{node.id}"
    return ast.unparse(tree)


def _parse(statement: str) -> ast.Call:
    tree = ast.parse(f"options.{statement}", mode="eval").body
    if not isinstance(tree, ast.Call):
        raise ValueError("expected one option call, such as deviceIterations(4)")
    beginning: ast.expr = tree
    while isinstance(beginning, (ast.Call, ast.Attribute)):
        beginning = beginning.func if isinstance(beginning, ast.Call) else beginning.value
    _check_depth(tree)
    for node in ast.walk(tree):
        _check_node(node, beginning)
    return tree


def _check_depth(tree: ast.AST) -> None:
    """Refuse expressions that are nested too deeply to be evaluated within Python's
    recursion limit.
    """
    level, depth = [tree], 0
    while level:
        level, depth = [n for each in level for n in ast.iter_child_nodes(each)], depth + 1
        if depth > _DEEPEST:
            raise ValueError("the values are nested too deeply")


def _check_node(node: ast.AST, options: ast.AST) -> None:
    if not isinstance(node, _UNDERSTOOD):
        raise ValueError(f"not a literal: {ast.unparse(node)}")
    if isinstance(node, ast.UnaryOp):
        ast.literal_eval(node)
    if isinstance(node, ast.Name) and node is not options and node.id not in _MODULES:
        raise ValueError(f"unknown name {node.id}")
    if isinstance(node, ast.Attribute):
        group = node.value is options and node.attr in _PRIVATE_GROUPS
        if node.attr.startswith("_") and not group:
            raise ValueError(f"private name {node.attr}")
        if not isinstance(node.value, (ast.Name, ast.Attribute, ast.Call)):
            raise ValueError(f"an attribute of {ast.unparse(node.value)}")
    if isinstance(node, ast.Call) and not isinstance(node.func, ast.Attribute):
        raise ValueError("only calls of named setters are allowed")
    if (isinstance(node, ast.keyword) and node.arg is None) or (
        isinstance(node, ast.Dict) and None in node.keys
    ):
        raise ValueError("a dictionary spread with **")


def _value(node: ast.expr | None, options: Any) -> Any:
    match node:
        case ast.Call(func=ast.Attribute(attr=name)):
            setter = _callable(_value(node.func, options), name)
            named = {str(k.arg): _value(k.value, options) for k in node.keywords}
            return setter(*(_value(argument, options) for argument in node.args), **named)
        case ast.Attribute():
            module = ast.unparse(node.value).removesuffix(".enums")
            if module in _MODULES:
                return _module_member(module, node.attr)
            return _member(_value(node.value, options), node.attr)
        case ast.Name():
            return options
        case ast.List() | ast.Tuple() | ast.Set():
            kind = {ast.List: list, ast.Tuple: tuple, ast.Set: set}[type(node)]
            return kind(_value(item, options) for item in node.elts)
        case ast.Dict():
            pairs = zip(node.keys, node.values, strict=True)
            return {_value(key, options): _value(value, options) for key, value in pairs}
        case _:
            assert node is not None
            return ast.literal_eval(node)


def _member(owner: Any, name: str) -> Any:
    """Look up an attribute of a known object only. Methods of strings and numbers could take any
    time and memory: ``"".ljust(1 << 40)``.
    """
    if isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__:
        return owner[name]
    ours = any(cls.__module__.startswith("poptorch.") for cls in type(owner).__mro__)
    if not ours or isinstance(owner, enum.Enum):
        raise InvalidAttribute(
            f"{name} of {owner!r} cannot be used in a configuration file", fix=_ALLOWED
        )
    return getattr(owner, name)


def _module_member(module: str, name: str) -> Any:
    if module == "torch":
        member = getattr(torch, name, None)
        if isinstance(member, torch.dtype):
            return member
    elif name in _CONSTRUCTORS or name in _ENUMS:
        return _CONSTRUCTORS.get(name) or _ENUMS[name]
    raise InvalidAttribute(f"{module}.{name} cannot be used in a configuration file", fix=_ALLOWED)


def apply_json(options: Any, text: str) -> None:
    """Apply a JSON object. All setters are looked up before the first call."""
    try:
        calls = json.loads(text)
    except RecursionError as error:
        raise InvalidValue(
            "A file of options must contain a JSON object of setters and arguments",
            got="the values are nested too deeply",
            fix=_JSON,
        ) from error
    if not isinstance(calls, dict):
        raise InvalidValue(
            "A file of options must contain a JSON object of setters and arguments",
            got=text,
            fix=_JSON,
        )
    setters = [(_accessor(options, path), value) for path, value in calls.items()]
    for setter, value in setters:
        setter(*(value if isinstance(value, list) else [_enum_member(value)]))


def _accessor(options: Any, path: str) -> Callable[..., Any]:
    target = options
    for depth, name in enumerate(path.split(".")):
        if name.startswith("_") and (depth or name not in _PRIVATE_GROUPS):
            raise InvalidAttribute(
                f"Invalid attribute {path}",
                got="a name that begins with an underscore",
                fix="use the names of setters, for example deviceIterations",
            )
        target = _member(target, name)
    return _callable(target, path)


def _callable(target: Any, name: str) -> Callable[..., Any]:
    if not callable(target):
        raise InvalidAttribute(
            f"Invalid attribute {name}",
            got="this name is not a setter of options",
            fix="use the names of setters, for example deviceIterations",
        )
    return target  # type: ignore[no-any-return]


def _enum_member(value: Any) -> Any:
    if not isinstance(value, str) or value.count(".") != 1:
        return value
    name, member = value.split(".")
    return _ENUMS[name].__members__.get(member, value) if name in _ENUMS else value
