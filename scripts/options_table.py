"""Writes docs/reference/options_table.md from the library's own table of options.

python scripts/options_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._base.source import OURS
from poptorch.options import Options
from poptorch.options.overview import settings
from poptorch.options.table import Effect

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "options_table.md"
HEAD = """\
# Options

A setter is written after `options.`; setters chain. Options are frozen when a model or a data
loader takes them; `options.clone()` can be changed again.

```python
import poptorch

options = poptorch.Options().deviceIterations(4).syncPattern(poptorch.SyncPattern.SinglePipeline)
options.Training.gradientAccumulation(2)
assert options.withoutEffect() == ["syncPattern"]
```

`options.withoutEffect()` lists what was changed and does nothing here. The log says so of each,
once, when a model is wrapped: at INFO for hints to hardware (H), as a warning for what a script may
be waiting for (M). `poptorch options [file]` shows this table with the values of the environment
and of files of option calls.

This page is made from the options' own rows by `scripts/options_table.py`.

"""
COLUMNS = "| option | default | effect | what it does |\n|---|---|---|---|\n"
KEYS = """
## Keys of the backend compiler

Each is set with `options._Popart.set(key, value)`. Those without a setter above:

"""


def page() -> str:
    """Return the page as it should be."""
    options = Options()
    letters = "".join("- **{}** {}\n".format(*effect.value) for effect in Effect)
    named, keys = [], []
    for option, group, row in settings(options):
        value = row.values[0].text(group).replace(OURS, "poptorch")
        sentence = row.sentence.replace("``", "`")
        shown = value if value == "unset" else f"`{value}`"
        line = f"| `{option}` | {shown} | {row.effect.value[0]} | {sentence} |\n"
        (keys if option.startswith("_Popart") else named).append(line)
    return HEAD + letters + "\n" + COLUMNS + "".join(named) + KEYS + COLUMNS + "".join(keys)


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
