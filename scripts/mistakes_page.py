"""Write docs/reference/mistakes.md: run common mistakes, and show what each of them prints."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import re
import sys
import textwrap
from pathlib import Path

import torch

import poptorch
from poptorch._base import log
from poptorch._session.host_changes import periodic_checks

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "mistakes.md"
HEAD = """\
# Common mistakes

<!-- Written by scripts/mistakes_page.py, which runs them. -->

This page shows common mistakes and the message that poptorch prints for each of them. All programs
begin with the following lines. `wrapped(model, accumulation)` calls `poptorch.trainingModel` with
options that have this gradient accumulation.

"""
FIRST = """\
import torch
from torch.nn.functional import cross_entropy

import poptorch


class Net(torch.nn.Linear):
    def forward(self, x, labels):
        scores = super().forward(x)
        return scores, cross_entropy(scores, labels)


def wrapped(model, accumulation=1, **arguments):
    options = poptorch.Options()
    options.Training.gradientAccumulation(accumulation)
    return poptorch.trainingModel(model, options, **arguments)


x, labels = torch.arange(32.0).reshape(8, 4) / 32, torch.arange(8) % 3
"""
MISTAKES = {
    "backward() after a call": "scores, loss = wrapped(Net(4, 3))(x, labels)\nloss.backward()",
    "optimizer.step() after a call": """
        model = Net(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = wrapped(model, optimizer=optimizer)
        training(x, labels)
        optimizer.step()""",
    "Reading gradients": """
        model = Net(4, 3)
        training = wrapped(model)
        training(x, labels)
        print(model.weight.grad)""",
    "A model without a loss": "wrapped(torch.nn.Linear(4, 3))(x)",
    "An optimizer that was created from another model": """
        optimizer = torch.optim.SGD(Net(4, 3).parameters(), lr=0.1)
        wrapped(Net(4, 3), optimizer=optimizer)(x, labels)""",
    "One micro-batch where four are needed": "wrapped(Net(4, 3), 4)(x[:2], labels[:2])",
    "torch's DataLoader with accumulation": """
        data = torch.utils.data.TensorDataset(x, labels)
        training = wrapped(Net(4, 3), 2)
        for batch in torch.utils.data.DataLoader(data, batch_size=4):
            training(*batch)""",
    "A larger batch with options.programs(1)": """
        options = poptorch.Options().programs(1)
        training = poptorch.trainingModel(Net(4, 3), options)
        training(x[:3], labels[:3])
        training(x, labels)""",
    "A label that is too large": "wrapped(Net(4, 3))(x, labels + 1)",
    "A learning rate that is changed without setOptimizer": """
        model = Net(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = wrapped(model, optimizer=optimizer)
        training(x, labels)
        optimizer.param_groups[0]["lr"] = 0.01
        training(x, labels)""",
    "Weights that are set on the host": """
        model = Net(4, 3)
        training = wrapped(model)
        training(x, labels)
        with torch.no_grad():
            model.weight.zero_()
        training(x, labels)""",
    "Options that are changed after wrapping": """
        options = poptorch.Options()
        poptorch.trainingModel(Net(4, 3), options)
        options.deviceIterations(4)""",
    "A number for options": "poptorch.trainingModel(Net(4, 3), options=4)",
    "A model that is wrapped twice": """
        model = Net(4, 3)
        training = wrapped(model)
        again = wrapped(model)""",
    "A branch on the values of a tensor": """
        class Branches(Net):
            def forward(self, x, labels):
                return super().forward(x if x.sum() > 0 else -x, labels)


        wrapped(Branches(4, 3))(x, labels)""",
    "print in forward": """
        class Prints(Net):
            def forward(self, x, labels):
                print(x)
                return super().forward(x, labels)


        wrapped(Prints(4, 3))(x, labels)""",
    "A loss that is NaN": """
        training = wrapped(Net(4, 3))
        training(x * torch.inf, labels)""",
    "manual_seed after the first call": """
        class Drops(Net):
            def forward(self, x, labels):
                return super().forward(torch.nn.functional.dropout(x), labels)


        training = wrapped(Drops(4, 3))
        training(x, labels)
        torch.manual_seed(1)
        training(x, labels)""",
    "More kinds of inputs than programs": """
        options = poptorch.Options().programs(2)
        inference = poptorch.inferenceModel(torch.nn.Linear(4, 3), options)
        for value in (x[0], x, x[None]):
            inference(value)""",
    "clip_grad_norm_ after a call": """
        model = Net(4, 3)
        training = wrapped(model)
        training(x, labels)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)""",
}


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"[warning] {record.getMessage()}")


def printed(code: str, name: str) -> str:
    """Run lines after the first lines, as a file of this name. Return errors and warnings."""
    whole = FIRST + code + "\n"
    linecache.cache[name] = (len(whole), None, whole.splitlines(keepends=True), name)
    torch.manual_seed(0)
    listener, error = _Lines(), ""
    for logger in (log.python, log.engine):
        logger.addHandler(listener)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(whole, name, "exec"), {"__name__": "__main__"})
    except Exception as raised:
        error = f"{type(raised).__module__}.{type(raised).__name__}: {raised}"
        error = error.removeprefix("builtins.")
    finally:
        for logger in (log.python, log.engine):
            logger.removeHandler(listener)
    return "\n".join([*listener.lines, error]).strip()


def page() -> str:
    """Return the text of the page. Each mistake runs on the interpreter."""
    plain, often = poptorch.Options, periodic_checks.CHECK_EVERY
    periodic_checks.CHECK_EVERY = 0.0  # two calls in a row may be closer together than the default
    poptorch.Options = lambda: plain().backend("reference").showCompilationProgressBar(False)
    try:
        parts = [HEAD, "```py\n", FIRST, "```\n"]
        for number, (title, code) in enumerate(MISTAKES.items(), 1):
            code = textwrap.dedent(code).strip()
            text = printed(code, f"mistake{number}.py")
            lines = "\n".join(
                textwrap.fill(line, 100, subsequent_indent="    ", break_long_words=False)
                for line in text.splitlines()
            )
            lines = re.sub(r"mistake\d+\.py", "train.py", lines)
            parts.append(f"\n## {title}\n\n```py\n{code}\n```\n\n```text\n{lines}\n```\n")
        return "".join(parts)
    finally:
        poptorch.Options, periodic_checks.CHECK_EVERY = plain, often


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"wrote {PAGE}\n")
