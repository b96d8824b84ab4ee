"""Pages as a browser draws them."""

import re
import shutil
import subprocess
from html import escape
from pathlib import Path

from helpers import patience

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
WIDE = """
for (const each of document.querySelectorAll("details")) each.open = true;
const wide = [...document.body.querySelectorAll("*")].filter(each => {
  if (each.parentElement.closest(".scroll")) return false;
  const box = each.getBoundingClientRect(), column = each.parentElement.getBoundingClientRect();
  return box.right > innerWidth || (!each.closest("svg") && box.right > column.right + 1);
});
Object.assign(parent.document.body.dataset, {
  ready: document.body.dataset.ready, width: innerWidth,
  wide: wide.map(each => each.outerHTML.slice(0, 80)).join(" "),
});
"""


def opened(address: str, folder: Path, *settings: str) -> str:
    """Return the page of an address as it is when its scripts have run."""
    command = [
        str(BROWSER),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--disable-background-networking",
        "--allow-file-access-from-files",
        f"--user-data-dir={folder}/user",
        "--virtual-time-budget=600000",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, *settings, address],
        capture_output=True,
        text=True,
        check=True,
        timeout=patience.HANGS,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def drawn(text: str, folder: Path, width: int, script: str, *settings: str) -> dict[str, str]:
    """Return the data of ``parent.document.body``, which a script in a page adds to.

    After that all is unfolded, and elements that are too wide are noted.
    """
    text = escape(text.replace("</body>", f"<script>{script}{WIDE}</script></body>"))
    path = folder / "frame.html"  # windows are 500 pixels wide at least
    path.write_text(f'<iframe width="{width}" height="844" frameborder="0" srcdoc="{text}">')
    page = opened(path.as_uri(), folder, "--window-size=1400,900", *settings)
    (body,) = re.findall(r"<body [^>]+>", page)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', body))
