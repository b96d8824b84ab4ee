"""Define the arguments and help pages of the command ``poptorch``. Each subcommand is imported when
it runs.

Nothing here imports torch, so that help pages and messages about wrong use take only a tenth of a
second.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import migrate
from .commands import add, complete

CALLS = 20  # ``doctor`` ends a script after this number of calls


def _later(module: str, function: str) -> Callable[[argparse.Namespace], int]:
    def run(chosen: argparse.Namespace) -> int:
        found = importlib.import_module(f".{module}", __package__)
        return getattr(found, function)(chosen)  # type: ignore[no-any-return]

    return run


def _add_options(commands: Any) -> None:
    parser = add(
        commands,
        "options",
        "show every option, its value and its effect here",
        "poptorch options\npoptorch options training.cfg --all",
    )
    parser.add_argument(
        "file", nargs="*", help=("files with option calls, in the format of Options.loadFromFile")
    )
    parser.add_argument(
        "--all", action="store_true", help=("also show backend settings that are not set")
    )
    parser.set_defaults(run=_later("listings", "options"))


def _add_passes(commands: Any) -> None:
    parser = add(
        commands,
        "passes",
        "list the passes of a compilation, or show what each one changes",
        "poptorch passes\npoptorch passes model.py:train --diff\n"
        "poptorch passes --without lanes --diff train.py --epochs 1",
        "With a script, it runs, or is imported and its function called, until it first compiles\n"
        "or calls a wrapped model. The command prints how many lines of the program each pass\n"
        "adds and removes, and ends the script.\n\n"
        "With POPTORCH_LOG_LEVEL=DEBUG, a compilation logs how long each pass takes.",
    )
    add_passes_options(parser)
    parser.add_argument("script", nargs="?", default="", help="a file, or file:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=_later("passes_command", "passes"))


def add_passes_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--diff", action="store_true", help="also print these lines")
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="PASS",
        help=("leave out a pass that can be left out; you can use this option several times"),
    )


def _add_cache(commands: Any) -> None:
    parser = add(
        commands,
        "cache",
        "list, explain and trim cached executables",
        "poptorch cache --dir ./cache list\npoptorch cache explain 3f2a",
    )
    parser.add_argument(
        "--dir", help=("folder of the cache (default: POPTORCH_CACHE_DIR, then POPART_CACHE_DIR)")
    )
    actions = parser.add_subparsers(required=True, metavar="action")
    example = "poptorch cache --dir ./cache list"
    listing = add(actions, "list", "print one line per entry, the latest first", example)
    listing.set_defaults(run=_later("caches", "list_entries"))
    explain = add(
        actions,
        "explain",
        "show what an entry was compiled from, or how two entries differ",
        "poptorch cache explain 3f2a\npoptorch cache explain 3f2a 81b0",
    )
    explain.add_argument("key", help="a key, or its first characters")
    explain.add_argument(
        "other",
        nargs="?",
        help=("a second key to compare with (default: show everything about the first key)"),
    )
    explain.set_defaults(run=_later("caches", "explain"))
    example = "poptorch cache trim --max-mb 500 --days 30"
    trimming = add(
        actions,
        "trim",
        "remove damaged entries, old entries, and entries above a total size",
        example,
    )
    trimming.add_argument(
        "--max-mb",
        type=float,
        help=("keep the most recently used entries, up to this many megabytes"),
    )
    trimming.add_argument(
        "--days", type=float, help=("remove entries that were not used for this many days")
    )
    trimming.set_defaults(run=_later("caches", "trim_folder"))


_DESCRIPTION = """
Without a script: checks the C++ compiler, torch, the caches, threads and memory. If something is
wrong, the command says what to do, and the exit status is 1.

With a script: runs it, and explains each wrapped model before it is compiled. It ends the script
after some calls, or before a model that cannot be compiled. At the end it says whether the host or
the device limited the run.

With FILE.py:NAME, where NAME is a module, or a class or function that makes one: imports the file
and explains the module. Code under if __name__ == "__main__" does not run. If you also pass the
shapes of its inputs, such as 8,3 or 8:int64, or labels=8:int64 for a keyword argument, its forward
runs once. Without shapes, only its source is searched.

The first line of the output says what is run."""
_EXAMPLE = """
poptorch doctor
poptorch doctor --calls 5 train.py --epochs 1
poptorch doctor --training model.py:Classifier 16,1,28,28 16:int64
poptorch doctor --calibrate
poptorch doctor --training bert.py:make input_ids=8,128:int64 labels=8:int64"""


def _add_doctor(commands: Any) -> None:
    does = "check this machine, or list what cannot be captured and what limits a run"
    parser = add(commands, "doctor", does, _EXAMPLE, _DESCRIPTION)
    parser.add_argument("target", nargs="?", default="", help="a script, or FILE.py:NAME")
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help=(
            "measure again which library computes matrix products fastest, and use the "
            "result for code that is compiled later"
        ),
    )
    parser.add_argument(
        "--training",
        action="store_true",
        help=("explain the module for training (default: for inference)"),
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=CALLS,
        help=f"end the script after this many calls (default: {CALLS}; 0: never)",
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        help=("arguments of the script, or shapes of the inputs"),
    )
    parser.set_defaults(run=_later("doctor", "run"))


def _add_estimate(commands: Any) -> None:
    parser = add(
        commands,
        "estimate",
        "estimate the cost of a script's models on IPUs",
        "poptorch estimate train.py\npoptorch estimate --system bow:64 --all train.py --epochs 1\n"
        "poptorch estimate --processes 8,64,1024 --latency 20us --bandwidth 100Gb train.py",
        "The script runs until it first compiles or calls a wrapped model. The command estimates\n"
        "the cost of this model and ends the script. With --all, it estimates each wrapped model\n"
        "at its first use, and the script runs to its end. With --processes, it compiles the\n"
        "model, measures a few calls on this batch, and estimates the time of a call for each\n"
        "number of processes. Each process is assumed to run on its own machine.",
    )
    parser.add_argument(
        "--system", help=("the system, as kind:number (default: POPTORCH_POD, or mk2:64)")
    )
    parser.add_argument(
        "--all", action="store_true", help=("estimate every model, and let the script run")
    )
    parser.add_argument(
        "--processes",
        type=_counts,
        metavar="N,N",
        help=("numbers of processes to estimate, for example 8,64,1024"),
    )
    parser.add_argument(
        "--latency", help=("one-way latency of the link between the processes, for example 20us")
    )
    parser.add_argument("--bandwidth", help=("bandwidth of the link per second, for example 100Gb"))
    parser.add_argument(
        "--json", type=Path, help=("write the profile of the last estimate into this file")
    )
    parser.add_argument(
        "--html", type=Path, help=("also write the report as a page into this file")
    )
    parser.add_argument("script", type=Path)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=_later("costs", "estimate"))


def _counts(text: str) -> tuple[int, ...]:
    complete()
    from .._ipu_model import scaling

    try:
        return scaling.counts_of([int(each) for each in text.split(",")])
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 8,64,1024, not {text}") from None


def _add_report(commands: Any) -> None:
    parser = add(
        commands,
        "report",
        "print a profile report, or compare two",
        "poptorch report reports/training\n"
        "poptorch report --html page.html reports/training/profile.json\n"
        "poptorch report --compare old/training new/training --budget memory=3%,cycles=1%",
        "With a budget, the exit status is 1 if the new profile exceeds it.",
    )
    parser.add_argument(
        "file", type=Path, nargs="?", help=("profile.json, or the folder that contains it")
    )
    parser.add_argument("--html", type=Path, help="write the page into this file")
    parser.add_argument(
        "--compare", type=Path, nargs=2, metavar=("OLD", "NEW"), help="compare two profiles"
    )
    parser.add_argument(
        "--budget",
        help=("by how much the new profile may exceed the old one: memory=3%%,cycles=1%%"),
    )
    parser.set_defaults(run=_later("costs", "report"))


def _add_export(commands: Any) -> None:
    parser = add(
        commands,
        "export",
        "write a script's program as plain PyTorch, or as a page",
        "poptorch export -o step.py train.py --epochs 1\n"
        "poptorch export -o step.py model.py:train\n"
        "poptorch export --html step.html train.py",
        "The script runs, or is imported and its function called, until it first compiles or\n"
        "calls a wrapped model. The command writes the model's program and ends the script.\n\n"
        "step.py only needs torch and safetensors. Its function `step` makes one call of the\n"
        "model, with loops, forward, backward and update as lines that you can read and change.\n"
        "step.safetensors contains weights, state and a batch, with which `python step.py` runs.\n"
        "You can also use the files in a script:\n\n"
        "    import step\n"
        '    state, batch = step.load("step.safetensors")\n'
        "    loss = step.step(*state, *batch)  # or torch.compile(step.step)\n\n"
        "step.html shows the program in a browser: operators by module, what they read and write,\n"
        "and what they cost, next to your source. The page loads no other files.",
    )
    add_outputs(parser)
    parser.add_argument("script", help="a file, or file:function")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(run=_later("exports", "export"))


def add_outputs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o", "--output", type=Path, help=("the Python file to write, for example step.py")
    )
    parser.add_argument("--html", type=Path, help="the page to write, for example step.html")


COMMANDS = {
    "options": _add_options,
    "cache": _add_cache,
    "doctor": _add_doctor,
    "passes": _add_passes,
    "estimate": _add_estimate,
    "report": _add_report,
    "export": _add_export,
    "migrate": migrate.add_migrate,
}
