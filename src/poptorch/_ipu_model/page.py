"""``report.html``: one file that a browser opens without a server or a network.

It shows what ``profile.json`` has. Plotly draws, and travels inside the file; the page is light or
dark as the reader's system is, and patterns tell apart what colours do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._base import log
from . import figures, page_parts

Profile = Mapping[str, Any]

GET_PLOTLY = "pip install 'poptorch[report]'"

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1200px; padding: 1em; }
h1 { font-size: 1.4em; } h2 { font-size: 1.15em; margin-top: 2em; border-bottom: 1px solid; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .15em .7em; text-align: left; border-bottom: 1px solid #8884; }
th[data-sort] { cursor: pointer; } td.n { text-align: right; font-variant-numeric: tabular-nums; }
details { margin-left: 1.2em; } nav a { margin-right: 1em; }
.verdict { font-weight: bold; } .note { opacity: .75; }
"""

_SCRIPT = """
const dark = matchMedia("(prefers-color-scheme: dark)");
function draw() {
  const ink = dark.matches ? "#e4e4e4" : "#222", line = dark.matches ? "#444" : "#ddd";
  for (const [id, figure] of Object.entries(FIGURES)) {
    const layout = structuredClone(figure.layout);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = {color: ink};
    for (const axis of ["xaxis", "yaxis"]) layout[axis] = {...layout[axis], gridcolor: line};
    Plotly.react(id, figure.data, layout, {responsive: true, displaylogo: false});
  }
}
dark.addEventListener("change", draw);
draw();
for (const head of document.querySelectorAll("th[data-sort]")) head.onclick = () => {
  const at = head.cellIndex, body = head.closest("table").tBodies[0];
  const value = row => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const down = head.dataset.sort = head.dataset.sort === "down" ? "up" : "down";
  const rows = [...body.rows].sort((a, b) => {
    const x = value(a), y = value(b), order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
    return down === "down" ? -order : order;
  });
  body.append(...rows);
};
document.body.dataset.ready = "yes";
"""


def write(profile: Profile, path: Path, before: Profile | None = None) -> bool:
    """Write a report; without plotly say how to get it, once.

    Args:
        profile: the content of ``profile.json``.
        path: of the file.
        before: another one, to compare with.

    Returns:
        Whether it was written.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        if not _said:
            _said.append(path)
            log.python.warning("No %s is written, which needs plotly: %s", path, GET_PLOTLY)
        return False
    path.write_text(html(profile, get_plotlyjs(), before), encoding="utf-8")
    return True


_said: list[Path] = []


def html(profile: Profile, plotly: str, before: Profile | None = None) -> str:
    """Return the page.

    Args:
        profile: the content of ``profile.json``.
        plotly: the library's JavaScript.
        before: another profile, to compare with.
    """
    drawn = figures.figures(profile)
    views = page_parts.views(profile, before)
    links = "".join(f'<a href="#{name}">{name}</a>' for name in views)
    body = "".join(
        f'<section id="{name}"><h2>{name.capitalize()}</h2>'
        + (f'<div id="figure-{name}"></div>' if f"figure-{name}" in drawn else "")
        + f"{text}</section>"
        for name, text in views.items()
    )
    data = json.dumps(drawn).replace("<", "\\u003c")  # no text ends the script, or begins a comment
    title = page_parts.escape(f"{profile['name']} on {profile['estimated']['system']}")
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1><nav>{links}</nav>{body}"
        f"<script>{plotly}</script><script>const FIGURES = {data};{_SCRIPT}</script></body></html>"
    )
