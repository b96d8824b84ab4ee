"""Write docs/reference/options_table.md from the library's own table of options.

Usage: python scripts/options_table.py
"""

from __future__ import annotations

from pathlib import Path

from poptorch._base.source import OURS
from poptorch.options import Options
from poptorch.options.option_table import Effect
from poptorch.options.overview import settings
from poptorch.options.popart import NO_EFFECT

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "options_table.md"
HEAD = """\
# Options

This page lists all options. Write a setter after `options.`; setters return the options, so you
can chain them. Options are frozen when you pass them to a model or a data loader. You can still
change a copy, `options.clone()`.

```python
import poptorch

options = poptorch.Options().deviceIterations(4).syncPattern(poptorch.SyncPattern.SinglePipeline)
options.Training.gradientAccumulation(2)
assert options.withoutEffect() == ["syncPattern"]
```

`options.withoutEffect()` lists the options that you changed and that have no effect here. When you
wrap a model, the log names each of them once: at level INFO if the option is a hint to the hardware
(H), and as a warning if a script may rely on its effect (M). `poptorch options [file]` shows this
table with the values from the environment and from a file of options.

`scripts/options_table.py` generates this page. The column "effect" contains one of these letters:

"""
COLUMNS = "| option | default | effect | what it does |\n|---|---|---|---|\n"
KEYS = """
## Keys of the backend compiler

`options._Popart.set(key, value)` sets a key. The table lists the keys that have an effect but
no setter above, and the keys that have no effect although a script may rely on them (M).

"""
IGNORED = """
The following keys are accepted and have no effect, because they configure a compiler that poptorch
does not use:

"""


def page() -> str:
    """Return the text of the page."""
    options = Options()
    letters = "".join("- **{}** {}\n".format(*effect.value) for effect in Effect)
    named, keys, ignored = [], [], []
    for option, group, row in settings(options):
        value = row.values[0].text(group).replace(OURS, "poptorch")
        sentence = row.sentence.replace("``", "`")
        shown = value if value == "unset" else f"`{value}`"
        line = f"| `{option}` | {shown} | {row.effect.value[0]} | {sentence} |\n"
        if sentence == NO_EFFECT:
            ignored.append(f"- `{option}`\n")
        else:
            (keys if option.startswith("_Popart") else named).append(line)
    options_of_poptorch = COLUMNS + "".join(named)
    options_of_compiler = KEYS + COLUMNS + "".join(keys) + IGNORED + "".join(ignored)
    return HEAD + letters + "\n" + options_of_poptorch + options_of_compiler


if __name__ == "__main__":
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
