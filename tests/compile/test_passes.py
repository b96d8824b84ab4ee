"""The list of passes is what runs, in that order."""

import logging

import torch

import poptorch
from helpers.wrapping import Scaled, options, training
from poptorch._cli.main import main
from poptorch._compile import passes


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
