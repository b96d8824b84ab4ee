"""Print the values of an Options object as tables, and list its options without effect."""

from __future__ import annotations

import json
from typing import Any

from .._base import env, log
from .option_table import IDLE, MISSING, Effect, OptionSetting, PopartKey, rows_of
from .popart import REPORT_KEYS, key_rows

GROUPS = ("Training", "Precision", "Distributed", "TensorLocations", "Jit")
_reported: set[str] = set()


def settings(options: Any) -> list[OptionSetting]:
    """Return every option. The keys of ``_Popart`` without a setter come last."""
    groups = {"": options, **{f"{name}.": getattr(options, name) for name in GROUPS}}
    written = [
        OptionSetting(prefix + row.option, group, row)
        for prefix, group in groups.items()
        for row in rows_of(type(group))
    ]
    covered = {
        value.name
        for setting in written
        for value in setting.row.values
        if isinstance(value, PopartKey) and not value.part
    }
    return written + [OptionSetting(row.option, options, row) for row in key_rows(covered)]


def idle(options: Any) -> list[OptionSetting]:
    every = (each for each in settings(options) if each.row.effect in IDLE and each.changed)
    return sorted(every, key=lambda setting: setting.option)


def report_idle(options: Any) -> None:
    for setting in idle(options):
        if setting.option not in _reported:
            _reported.add(setting.option)
            say = log.python.warning if setting.row.effect is MISSING else log.python.info
            say("%s has no effect here. %s", setting.option, setting.row.sentence)
    try:
        given = json.loads(env.get("POPLAR_ENGINE_OPTIONS") or "{}")
    except ValueError:  # an invalid value is refused when the model is compiled
        given = {}
    unread = ", ".join(sorted(set(given) - REPORT_KEYS)) if isinstance(given, dict) else ""
    if unread and unread not in _reported:
        _reported.add(unread)
        log.python.warning("POPLAR_ENGINE_OPTIONS: these settings have no effect here: %s", unread)


def changes(options: Any) -> str:
    changed = (each for each in settings(options) if each.changed)
    pairs = (f"{each.option}={each.row.values[0].text(each.group)}" for each in changed)
    return f"{type(options).__name__}({', '.join(pairs)})"


def describe(options: Any, every: bool = False) -> str:
    """Return a text table. ``*`` marks changed values, and ``every`` includes all keys of
    ``_Popart``.
    """
    lines = ["  ".join(": ".join(effect.value) for effect in Effect)]
    for setting in settings(options):
        if every or setting.changed or not setting.option.startswith("_Popart"):
            value = setting.row.values[0].text(setting.group)
            mark = "*" if setting.changed else " "
            letter, _ = setting.row.effect.value
            lines.append(f"{mark} {letter} {setting.option} = {value}  # {setting.row.sentence}")
    return "\n".join(lines)
