"""Start the commands of the package poptorch without importing torch.

``import poptorch`` imports torch, which takes one to two seconds of processor time. A help page or
a list of devices does not need it. Commands therefore start here: the package is located but not
run, and its parts can be imported one by one. ``poptorch._cli.commands.complete`` runs the whole
package when a command needs it.
"""

import importlib.util
import sys


def _find() -> None:
    if "poptorch" not in sys.modules:
        spec = importlib.util.find_spec("poptorch")
        assert spec is not None
        sys.modules["poptorch"] = importlib.util.module_from_spec(spec)


def poptorch() -> int:
    _find()
    from poptorch._cli.main import main

    return main()


def gc_monitor() -> int:
    _find()
    from poptorch._cli.gc_tools import monitor

    return monitor()


def gc_info() -> int:
    _find()
    from poptorch._cli.gc_tools import info

    return info()
