"""The text of a report: summary, tables and the program as a tree."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .._base.tables import size_text, table
from .budget import compare
from .estimate import Advice

Profile = Mapping[str, Any]
MOST_ROWS = 500


def escape(value: object) -> str:
    """Return a value as text that is no markup; a profile may have any value in any place."""
    return html.escape(str(value))


def views(profile: Profile, before: Profile | None) -> dict[str, str]:
    """Return the content of every section by its name."""
    made = {
        "summary": _summary(profile),
        "memory": _memory(profile),
        "liveness": _liveness(profile),
        "schedule": '<p class="note">Drag to zoom, double-click to see all.</p>',
        "operators": _operators(profile) + _operators_here(profile),
        "program": _program(profile),
    }
    if profile["measured"]:
        made["measured"] = _measured(profile["measured"])
    if profile["settings"]:
        made["settings"] = _table(("setting", "value"), profile["settings"].items())
    if before is not None:
        rows = [
            (each.name, each.before, each.after, f"{each.change:+.1%}")
            for each in compare(before, profile)
        ]
        made["comparison"] = _table(("figure", "before", "now", "change"), rows)
    return made


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    titles = "".join(f'<th data-sort="">{escape(name)}</th>' for name in head)
    lines = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}"
        return f'<td class="n" data-value="{value}">{shown}</td>'
    return f"<td>{escape(value)}</td>"


def _summary(profile: Profile) -> str:
    priced, culprit = profile["estimated"], profile["estimated"]["culprit"]
    verdict = "It fits." if priced["fits"] else "It does not fit."
    where = f"{culprit['category']}, {size_text(culprit['bytes'])}, on IPU {culprit['chip']}"
    parts = [where, culprit["tensor"], culprit["module"], culprit["line"]]
    named = "; ".join(part for part in parts if part)
    rows = [
        ("items per second (estimated)", priced["items_per_second"]),
        ("seconds per call (estimated)", priced["seconds"]),
        ("cycles per call (estimated)", priced["cycles"]),
        ("share of peak", f"{priced['share_of_peak']:.1%}"),
        ("replicas", priced["replicas"]),
        *((f"time: {name}", f"{share:.1%}") for name, share in priced["bound"].items()),
    ]
    advice = "".join(f"<li>{escape(str(Advice(**each)))}</li>" for each in priced["advice"])
    guesses = ", ".join(f"{each['name']} {each['share']:.0%}" for each in priced["guesses"])
    return (
        f'<p class="verdict">{verdict}</p><p>Most: {escape(named)}; '
        f"{culprit['over']:+.1f} % against the limit.</p>"
        f"{_table(('figure', 'value'), rows)}"
        + (f"<h3>Advice</h3><ol>{advice}</ol>" if advice else "<p>No advice.</p>")
        + f'<p class="note">Estimated, not measured: within a factor {priced["error_band"]:g} '
        "where it was checked. Guessed, with its share of the result: "
        f"{escape(guesses) or 'nothing'}.</p>"
    )


def _memory(profile: Profile) -> str:
    limit = profile["target"]["tile_bytes"]
    rows = []
    for chip in profile["estimated"]["chips"]:
        peak, always = sum(chip["peak"].values()), sum(chip["always"].values())
        rows.append(
            (
                chip["chip"], size_text(peak), f"{peak / chip['limit']:.0%}", size_text(always),
                size_text(max(chip["tiles"])), f"{max(chip['tiles']) / limit:.0%}",
                size_text(sum(chip["tiles"]) / len(chip["tiles"])), chip["peak_at"],
            )
        )  # fmt: skip
    head = (
        "IPU", "peak", "of limit", "always", "fullest tile", "of its limit", "tile on average",
        "fullest at",
    )  # fmt: skip
    note = (
        '<p class="note">The peak is that of the fullest tile times the tiles: a program fits if '
        'the fullest tile does.</p><div id="figure-tiles"></div>'
    )
    return note + _table(head, rows)


def _liveness(profile: Profile) -> str:
    rows = [
        (chip["chip"], t["name"], t["category"], t["bytes"], t["module"], t["line"])
        for chip in profile["estimated"]["chips"]
        for t in chip["largest"]
    ]
    head = ("IPU", "live at the peak", "category", "bytes", "module", "line")
    return _table(head, rows)


def _operators(profile: Profile) -> str:
    rows = [
        (
            each["name"], each["module"], each["stage_pass"], each["chip"], each["count"],
            each["compute"] + each["exchange"] + each["sync"], each["compute"], each["exchange"],
            each["sync"], each["flops"], each["line"],
        )
        for each in profile["estimated"]["operators"][:MOST_ROWS]
    ]  # fmt: skip
    head = (
        "operator", "module", "pass", "IPU", "count", "cycles", "compute", "exchange", "sync",
        "FLOP", "line",
    )  # fmt: skip
    return _table(head, rows)


def _operators_here(profile: Profile) -> str:
    """What operators took on this machine, beside what they are estimated to take on IPUs."""
    rows = (profile["measured"] or {}).get("operators", ())
    if not rows:
        return ""
    clock = profile["estimated"]["clock"]
    modelled: dict[tuple[str, str, str], float] = {}
    for each in profile["estimated"]["operators"]:
        key = each["stage_pass"].lstrip("0123456789")[:1], each["name"], each["module"]
        cycles = each["compute"] + each["exchange"] + each["sync"]
        modelled[key] = modelled.get(key, 0.0) + cycles / clock * 1e3
    shown = [
        (
            each["name"], each["module"], each["direction"], each["count"], each["seconds"] * 1e3,
            modelled.get((each["direction"], each["name"], each["module"]), ""), each["line"],
        )
        for each in rows[:MOST_ROWS]
    ]  # fmt: skip
    head = (
        "operator", "module", "direction", "count", "ms here (measured)",
        "ms on an IPU, one micro-batch (estimated)", "line",
    )  # fmt: skip
    return (
        '<h3>On this machine</h3><p class="note">Measured, in one of the first two calls, in which '
        "operators run one by one, which is slower. Compiled code fuses operators; those that it "
        f"runs are not listed.</p>{_table(head, shown)}"
    )


def _program(profile: Profile) -> str:
    """A call, the passes of the schedule, the operators of each."""
    priced = profile["estimated"]
    passes: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for each in priced["operators"]:
        passes.setdefault((each["chip"], each["stage_pass"]), []).append(each)
    runs: dict[str, int] = {}
    for action in priced["schedule"]:
        name = action["name"].lstrip("LS")
        for _, stage_pass in passes:
            update = stage_pass == name
            if update or (name.startswith(stage_pass) and name[len(stage_pass) :].isdigit()):
                runs[stage_pass] = runs.get(stage_pass, 0) + 1
                break
    inner = "".join(
        f"<details><summary>{escape(name)} on IPU {escape(chip)}, {runs.get(name, 0)} times"
        "</summary>"
        + "".join(
            f"<div>{escape(o['name'])} x {escape(o['count'])}: "
            f"{o['compute'] + o['exchange'] + o['sync']:,.0f} cycles, {escape(o['module'])}</div>"
            for o in own[:100]
        )
        + "</details>"
        for (chip, name), own in sorted(passes.items())
    )
    return (
        f"<details open><summary>call: the schedule {escape(priced['runs'])} times</summary>"
        f"{inner}</details>"
    )


def _measured(measured: Mapping[str, Any]) -> str:
    first = measured["first"]
    rows = [
        ("what ran it", measured["tier"]),
        ("compiling, s", measured["compile_seconds"]),
        ("calls", measured["calls"]),
        ("most memory of the process", size_text(measured["process_bytes"])),
    ]
    if first:
        rows.append(("seconds of the last call shown", sum(
            first[-1][part] for part in ("prepare", "device", "collect")
        )))  # fmt: skip
    actions = [(a["name"], a["count"], a["seconds"] * 1e3) for a in measured.get("actions", ())]
    table = _table(("action", "count", "ms in one call"), actions) if actions else ""
    head = '<p class="note">On this machine, not on IPUs.</p>'
    return head + _table(("figure", "value"), rows) + table


def _text_here(measured: Mapping[str, Any]) -> list[str]:
    """What was measured on this machine, for a terminal."""
    lines = [f"measured here: {measured['calls']} calls, {measured['tier']}"]
    slow = [
        [o["name"], o["module"], o["direction"], str(o["count"]), f"{o['seconds'] * 1e3:.3g}"]
        for o in measured.get("operators", ())[:10]
    ]
    head = ["operator (here)", "module", "direction", "count", "ms in a call"]
    return lines + (table([head, *slow]) if slow else [])


def text(profile: Profile) -> str:
    """Return the summary for a terminal: verdict, rates, chips, the dearest operators."""
    priced, culprit = profile["estimated"], profile["estimated"]["culprit"]
    named = bool(culprit["tensor"])
    lines = [
        f"{profile['name']} on {priced['system']} (estimated)",
        f"{'fits' if priced['fits'] else 'DOES NOT FIT'}: {culprit['category']}, "
        f"{size_text(culprit['bytes'])} on IPU {culprit['chip']}, {culprit['over']:+.1f} % against "
        "the limit" + (f"; largest: {culprit['tensor']} {culprit['line']}" if named else ""),
        f"{priced['items_per_second']:,.0f} items/s, {priced['seconds']:.4g} s per call, "
        f"{priced['cycles']:,.0f} cycles, {priced['share_of_peak']:.1%} of peak",
    ]
    chips = [
        [str(c["chip"]), size_text(sum(c["peak"].values())), c["peak_at"]] for c in priced["chips"]
    ]
    dear = [
        [
            o["name"], o["module"], o["stage_pass"],
            f"{o['compute'] + o['exchange'] + o['sync']:,.0f}",
        ]
        for o in priced["operators"][:10]
    ]  # fmt: skip
    lines += table([["ipu", "peak", "at"], *chips])
    lines += table([["operator", "module", "pass", "cycles"], *dear])
    if profile["measured"]:
        lines += _text_here(profile["measured"])
    return "\n".join(lines)
