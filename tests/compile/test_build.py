"""What a program is built by: its list of passes; how gradients travel between processes."""

import logging

import torch

import poptorch
from helpers.wrapping import Scaled, options, training
from poptorch._cli.main import main
from poptorch._compile import build, passes
from poptorch._ir import slots
from poptorch._ir.slots import Kind, Slot

MOST = 1 << 20


def accumulator(name: str, size: float, dtype: torch.dtype = torch.float32) -> Slot:
    """Return one with so many times MOST bytes."""
    return Slot(Kind.ACCUM, (int(size * MOST) // dtype.itemsize,), dtype, name)


def test_large_reductions_travel_in_pieces_of_one_type() -> None:
    accums = [accumulator(*each) for each in zip("abcd", (0.6, 0.3, 0.6, 2), strict=True)]
    half = accumulator("e", 0.1, torch.float16)
    buckets = build._buckets([*accums[:2], half, *accums[2:]], MOST, 3)
    assert [[m.slot.path for m in b.members] for b in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [b.slot for b in buckets] == [
        slots.exchanged(at, b.slot.numel, b.slot.dtype) for at, b in enumerate(buckets, 3)
    ]
    assert [b.slot.dtype for b in buckets] == [torch.float32] * 3 + [torch.float16]
    assert all(b.slot.bytes <= MOST or len(b.members) == 1 for b in buckets)


def test_each_is_logged_with_its_time(caplog) -> None:
    poptorch.setLogLevel("TRACE")
    try:
        with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
            training(Scaled(torch.tanh), options(accumulation=2)).compile(torch.randn(4))
    finally:
        poptorch.setLogLevel("WARN")
    logged = [m.removeprefix("Pass ") for m in caplog.messages if m[:5] == "Pass "]
    assert logged == [each.name for each in passes.PASSES]
    (spent,) = [m.splitlines() for m in caplog.messages if m.startswith("Seconds in process")]
    assert [spent[1].split()[0], spent[2][:8], spent[-1][:3]] == ["part", "the rest", "all"]
    assert any(line.startswith("capture  ") for line in spent)
    graphs = [m for m in caplog.messages if m.startswith("graph ")]
    assert graphs
    assert all("\n  in  param." in graph for graph in graphs)


def test_the_command_lists_them(capsys) -> None:
    assert main(["passes"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.split() == ["pass", "room", "changes", "what", "it", "does"]
    for number, (line, each) in enumerate(zip(lines, passes.PASSES, strict=True), 1):
        assert line.startswith(f"{number}")
        assert f"  {each.name}" in line
        assert each.does in line
