"""Draw the results in benchmarks/results: the README's picture, and the plots of the Speed page.

``python scripts/pictures.py`` writes docs/overview.svg. The plots are drawn when the site is built.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = max((ROOT / "benchmarks" / "results").glob("*.md"))  # their names begin with the date
OVERVIEW = ROOT / "docs" / "overview.svg"
# These colours contrast with white and with the site's dark grey.
COLOURS = {
    "poptorch": "#5c6bc0",
    "torch.compile": "#c77700",
    "JAX": "#00875f",
    "ONNX Runtime": "#c2185b",
    "OpenVINO": "#8d6e63",
    "eager": "#7b8794",
    "DistributedDataParallel": "#7b8794",
    "as it runs": "#5c6bc0",
    "as a tree": "#00875f",
    "hierarchical": "#c77700",
}
WIDTH, BAR = 760, 16
# A plot is as narrow as a phone, so that its text is legible there. Labels are above their bars.
NARROW, EDGE, LETTER = 440, 6, 7.6  # the last one is the largest width of a letter
Row = tuple[str, Sequence[tuple[str, float | None]]]


def tables(heading: str) -> list[list[dict[str, str]]]:
    """Return the tables of one section of the results. Each row is a dict with column names."""
    text = RESULTS.read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", section, re.M):
        head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]]
                          for line in block.splitlines())  # fmt: skip
        found.append([dict(zip(head, row, strict=True)) for row in rows])
    return found


def number(cell: str) -> float | None:
    """Return the first number of a cell. Other numbers in it are goals or repetitions."""
    found = re.search(r"\d[\d,]*(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None


def origin() -> str:
    """Return the machine and the date of the results."""
    title, machine, *_ = RESULTS.read_text().split("\n\n")
    return f"{machine.split('; ')[0]}; compiled, float32; {title.split(', ')[1]}"


def bars(
    rows: Sequence[Row],
    shown: Callable[[float], str],
    top: int,
    left: float,
    width: float,
) -> tuple[str, int]:
    """Return bars for each row and contestant, and their total height.

    Labels are left of the bars, or above them if there is not enough room.
    """
    largest = max(value for _, each in rows for _, value in each if value is not None)
    parts, y = [], top
    for label, contestants in rows:
        present = [(name, value) for name, value in contestants if value is not None]
        if left > EDGE:
            parts.append(_text(left - 12, y + len(present) * BAR / 2 + 4, label, "end"))
        else:
            parts.append(_text(left, y + BAR - 4, label))
            y += BAR + 2
        for name, value in present:
            length = (width - left - 90) * value / largest
            parts.append(
                f'<rect x="{left}" y="{y}" width="{max(length, 1):.1f}" height="{BAR - 2}" rx="2"'
                f' fill="{COLOURS[name]}"><title>{escape(name)}</title></rect>'
            )
            parts.append(_text(left + length + 6, y + BAR - 5, shown(value), "start"))
            y += BAR
        y += 8
    return "".join(parts), y


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    where = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {where} fill="currentColor"{more}>{escape(text)}</text>'


def legend(names: Sequence[str], y: int) -> tuple[str, int]:
    """Return lines that explain the contestants' colours, and their total height."""
    parts, x = list[str](), float(EDGE)
    for name in names:
        width = 32 + LETTER * len(name)
        if parts and x + width > NARROW:
            x, y = EDGE, y + BAR + 2
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{COLOURS[name]}"/>'
        )
        parts.append(_text(x + 18, y + 11, name))
        x += width
    return "".join(parts), y + BAR + 8


def svg(content: str, height: int, title: str, more: str = "", width: int = WIDTH) -> str:
    """Return a picture that fills the width of its place."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
        f' font-family="sans-serif" font-size="13"{more}><title>{escape(title)}</title>'
        f"{content}</svg>"
    )


def plot(title: str, rows: Sequence[Row], shown: Callable[[float], str]) -> str:
    """Return the picture of a comparison: a legend with bars below it."""
    names = list(dict.fromkeys(name for _, each in rows for name, value in each if value))
    names_drawn, top = legend(names, 4)
    drawn, end = bars(rows, shown, top, EDGE, NARROW)
    return svg(names_drawn + drawn, end, title, width=NARROW)


def steps() -> str:
    """Return the speed-up over eager PyTorch of each float32 workload."""
    rows: list[Row] = []
    for label, times in _steps():
        eager = dict(times)["eager"]
        assert eager
        rows.append((label, [(name, eager / value) for name, value in times if value]))
    return plot("Speed of a step, eager PyTorch = 1", rows, "{:.2f}".format)


def inference() -> str:
    """Return the inference speed-up over eager PyTorch of each model."""
    (found,) = tables("Inference")
    names = ("poptorch", "torch.compile", "ONNX Runtime", "OpenVINO", "eager")
    rows: list[Row] = []
    for row in found:
        times = {name: number(row[name]) for name in names}
        eager = times["eager"]
        assert eager
        rows.append((row["model, rows"], [(n, eager / t) for n, t in times.items() if t]))
    return plot("Speed of inference, eager PyTorch = 1", rows, "{:.2f}".format)


def _steps() -> list[Row]:
    (found,) = tables("Steps")
    names = ("poptorch", "torch.compile", "JAX", "eager")
    rows = [(row["workload"], [(name, number(row[name])) for name in names]) for row in found]
    return [row for row in rows if "float16" not in row[0]]


def first_minute() -> str:
    """Return the seconds until a program without any cache runs at full speed."""
    found = tables("The first minute")[0]
    rows: list[Row] = [
        (row["row"], [("poptorch", number(row["full speed, `auto`"])),
                      ("torch.compile", number(row["torch.compile, first result"]))])
        for row in found if row["row"] in ("tutorial CNN, 16", "MLP", "LSTM", "BERT, 8",
                                           "ResNet-18 shape, 8 x 4")
    ]  # fmt: skip
    return plot("Seconds to full speed", rows, "{:.1f} s".format)


def growth() -> str:
    """Return how compile time grows with the number of accumulated micro-batches."""
    (found,) = tables("Growth")
    rows: list[Row] = [
        (f"{row['count']} micro-batches", [("poptorch", number(row["accumulation: compiling"]))])
        for row in found
    ]
    return plot("Seconds of compiling an update", rows, "{:.1f} s".format)


KINDS = "Kinds of programs"


def kinds_compiling() -> str:
    """Return the processor time to the first optimised step of each kind of program."""
    columns = {"poptorch": "poptorch, first", "torch.compile": "torch.compile, first"}
    return _kinds("Processor seconds to the first optimised step", columns, "{:.1f} s".format)


def kinds_steps() -> str:
    """Return the processor time of a step of each kind of program."""
    columns = {name: name for name in ("poptorch", "torch.compile", "eager")}
    return _kinds("Processor milliseconds of a step", columns, "{:.2f} ms".format)


def _kinds(title: str, columns: dict[str, str], shown: Callable[[float], str]) -> str:
    """Return the plot of some columns. A contestant that refuses a program has no bar."""
    (found,) = tables(KINDS)
    rows: list[Row] = [
        (row["program"], [(name, number(row[column])) for name, column in columns.items()])
        for row in found
    ]
    return plot(title, rows, shown)


def processes() -> str:
    """Return how close the speed of two processes is to twice the speed of one."""
    found = tables("Several processes")[0]
    rows: list[Row] = []
    for row in found:
        share, ratio = (
            number(row[column])
            for column in (
                "share of twice the speed of one process",
                "speed-up over DistributedDataParallel",
            )
        )
        assert share
        assert ratio
        speeds = [("poptorch", 2 * share), ("DistributedDataParallel", 2 * share / ratio)]
        rows.append((row["workload"], speeds))
    return plot("Speed of two processes, one process = 1", rows, "{:.2f}".format)


def curve() -> str:
    """Return the predicted efficiency of many processes, for each way of reducing gradients."""
    found = tables("A curve over processes")[0]
    ways = ("as it runs", "as a tree", "hierarchical")
    rows: list[Row] = [
        (f"{row['processes']} processes", [(way, number(row[way])) for way in ways])
        for row in found
    ]
    return plot("Efficiency predicted for BERT, one process = 1", rows, "{:.2f}".format)


def overview() -> str:
    """Return the README's picture, which is legible on a phone: the time of a call, and a plan."""
    tutorial = (ROOT / "docs" / "guide" / "placement.md").read_text()
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        blocks = re.findall("```python\n(.*?)```", tutorial, re.S)
        exec(next(block for block in blocks if "\nplan = " in block), names)
    schedule = names["plan"].staged.schedule
    head = ' font-weight="bold"'
    row, scale = _steps()[0], 1.6
    drawn, end = bars([(f"{name}", [(name, value)]) for name, value in row[1]],
                      "{:.2f} ms".format, 26, 112, WIDTH / scale)  # fmt: skip
    speeds = _text(
        9, 18, f"A training call of a small CNN, {row[0].split(', ')[1]} images", more=head
    )
    below = round(end * scale)
    parts = [
        f'<rect width="{WIDTH}" height="{below + 122}" rx="8" fill="#ffffff"/>',
        f'<g transform="scale({scale})">{speeds}{drawn}</g>',
        _text(14, below + 10, origin(), more=' font-size="15"'),
        _text(14, below + 46, "The pipeline tutorial's plan: six micro-batches, two chips",
              more=f'{head} font-size="17"'),
        f'<g transform="translate(6 {below + 50})">{schedule.to_svg()}</g>',
    ]  # fmt: skip
    title = "The time of a call next to eager, torch.compile and JAX, and a pipeline's plan"
    return svg("".join(parts), below + 122, title, ' color="#1f2933"') + "\n"


PLOTS = {
    "steps": steps,
    "inference": inference,
    "first minute": first_minute,
    "growth": growth,
    "processes": processes,
    "curve": curve,
}


# Earlier results have no such section.
KINDS_PLOTS = {"kinds compiling": kinds_compiling, "kinds steps": kinds_steps}
if f"\n## {KINDS}\n" in RESULTS.read_text():
    PLOTS |= KINDS_PLOTS


def drawn_in(text: str) -> str:
    """Return a page in which plots replace comments such as <!-- plot: steps -->."""
    return re.sub(
        r"<!-- plot: ([a-z ]+) -->",
        lambda match: f'<div class="plot">{_drawn(match[1])}</div>',
        text,
    )


def _drawn(name: str) -> str:
    is_missing = name in KINDS_PLOTS and name not in PLOTS
    return "These programs were not measured yet." if is_missing else PLOTS[name]()


if __name__ == "__main__":
    OVERVIEW.write_text(overview())
    print(f"wrote {OVERVIEW}")
