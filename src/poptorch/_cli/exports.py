"""``poptorch export``: a script's first program as a file of plain PyTorch, or as a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .._base.private import replaced
from .._session import exporting
from ..executor import PoplarExecutor
from .commands import Enough, Misuse, add, misuse, run_script


def add_export(commands: Any) -> None:
    parser = add(
        commands,
        "export",
        "write a script's program as plain PyTorch, or as a page",
        "poptorch export -o step.py train.py --epochs 1\n"
        "poptorch export -o step.py model.py:train\n"
        "poptorch export --html step.html train.py",
        "The script runs, or is imported and its function called, until it first compiles or\n"
        "calls a wrapped model. The command writes the program of that, and ends the script.\n\n"
        "step.py needs torch and safetensors alone: `step` makes one call of the model, with\n"
        "its loops, forward, backward and update as lines that you can read and change.\n"
        "step.safetensors holds weights, state and a batch; `python step.py` runs that.\n"
        "Write it, then use it:\n\n"
        "    import step\n"
        '    state, batch = step.load("step.safetensors")\n'
        "    loss = step.step(*state, *batch)  # or torch.compile(step.step)\n\n"
        "step.html shows a browser the program: operators by module, what they read and write,\n"
        "what they cost, beside your source. It fetches nothing.",
    )
    _add_outputs(parser)
    parser.add_argument("script", help="a file, or file:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's arguments")
    parser.set_defaults(run=_export)


def _add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, help="the Python, for instance step.py")
    parser.add_argument("--html", type=Path, help="the page, for instance step.html")


def _export(chosen: argparse.Namespace) -> int:
    file, _, function = chosen.script.partition(":")
    if not (chosen.output or chosen.html):  # they stand behind the script, among its arguments
        behind = argparse.ArgumentParser("poptorch export", add_help=False, allow_abbrev=False)
        _add_outputs(behind)
        chosen, chosen.arguments = behind.parse_known_args(chosen.arguments, chosen)
    if not Path(file).is_file():
        raise Misuse(f"There is no file {file}")
    files = [each for each in (chosen.output, chosen.html) if each is not None]
    if not files:
        raise Misuse("Say what to write: -o step.py, --html step.html, or both")
    with misuse():
        for each in files:
            exporting.check(each)
    exported: list[PoplarExecutor] = []

    def first(_: Any, executor: PoplarExecutor, /, *args: Any, **kwargs: Any) -> None:
        with misuse():
            exporting.export_for(executor._session, (args, kwargs), *files)
        exported.append(executor)
        raise Enough

    with replaced(PoplarExecutor, "__call__", first), replaced(PoplarExecutor, "compile", first):
        run_script(file, chosen.arguments, function)
    if not exported:
        raise Misuse(f"{file} used no wrapped model")
    for each in files:
        print(f"wrote {each}{', and what it works on beside it' * (each.suffix == '.py')}")
    return 0
