"""A name that torch no longer has costs a warning or an error that says so, never an import."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.wrapped import normal, options
from poptorch._base import private
from poptorch._capture import substitutes, value_reads
from poptorch._compile import cache, helper
from poptorch.backends.inductor import library
from poptorch.backends.inductor.backend import Inductor

VERSION = f"torch {torch.__version__} has no torch."
NAMES_OF = {
    lost: [name for name, (_, row) in private.ROWS.items() if row == lost]
    for lost in private._NAMES
}


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name be gone, as after torch has renamed it and all its own uses."""
    path, lost = private.ROWS[name]
    monkeypatch.setitem(private.ROWS, name, (f"{path}_renamed", lost))
    monkeypatch.setattr(private, "_EARLIER", {})


@pytest.fixture(autouse=True)
def _warnings_are_said_again(monkeypatch: pytest.MonkeyPatch):
    private._warn.cache_clear()
    substitutes._substitutes.cache_clear()
    yield
    substitutes._substitutes.cache_clear()


class Net(nn.Module):
    """With batch norm and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, y):
        out = self.norm(self.rnn(x)[0][:, -1])
        return out, nn.functional.mse_loss(out, y)


def losses() -> torch.Tensor:
    """Train a little with lanes, on the first tier."""
    torch.manual_seed(0)
    net = Net()
    training = poptorch.trainingModel(
        net, options(accumulation=2), torch.optim.SGD(net.parameters(), lr=0.1)
    )
    return torch.stack([training(normal(8, 2, 3), normal(8, 4))[1] for _ in range(2)])


def test_all_names_are_there() -> None:
    assert all(getattr(private, name) is not None for name in private.ROWS)


IMPORT = """
import importlib
usual = importlib.import_module
def without_torchs(name, *rest):
    if name.startswith("torch."):
        raise ImportError(f"No module named {name!r}")
    return usual(name, *rest)
importlib.import_module = without_torchs
import torch, poptorch
model = poptorch.inferenceModel(torch.nn.Linear(1, 1))
try:
    model(torch.ones(1, 1))
except poptorch.Error as error:
    print(error.message)
"""


@pytest.mark.slow
def test_importing_needs_none() -> None:
    done = programs.run("-W", "error", "-c", IMPORT)
    assert done.returncode == 0, done.stderr
    assert VERSION in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF[private.CAPTURE])
def test_capturing_without(name: str, monkeypatch) -> None:
    """An error with four parts that names the version, or the usual numbers."""
    wanted = usual()
    remove(name, monkeypatch)
    value_reads._dispatch_mode.cache_clear()
    got: torch.Tensor | poptorch.Error
    try:
        got = losses()
    except poptorch.Error as error:
        got = error
    if isinstance(got, torch.Tensor):  # this model does not need it
        torch.testing.assert_close(got, wanted)
    else:
        assert VERSION in got.message
        assert "Fix:" in got.message


@functools.cache
def usual() -> torch.Tensor:
    """Return the losses with all names."""
    return losses()


@pytest.mark.slow
@pytest.mark.parametrize(
    "lost", [private.RECURRENT, private.BACKWARD, private.MEMORY, private.UNREAD, private.LINES]
)
def test_training_goes_on_without(lost: str, monkeypatch, caplog) -> None:
    wanted = usual()
    for name in NAMES_OF[lost]:
        if "data" not in name:  # those are for packed sequences
            remove(name, monkeypatch)
    torch.testing.assert_close(losses(), wanted)
    assert VERSION in caplog.text
    assert lost in caplog.text


def test_loops_and_branches_without(monkeypatch) -> None:
    class Loop(nn.Module):
        def forward(self, x):
            return poptorch.for_loop(3, lambda x: x * 2, [x])[0]

    class Branch(nn.Module):
        def forward(self, x):
            return poptorch.cond(x.sum() > 0, lambda x: x * 2, [x], lambda x: x, [x])[0]

    for name, module in (("while_loop_op", Loop()), ("cond_op", Branch())):
        remove(name, monkeypatch)
        with pytest.raises(poptorch.Error, match="has no torch") as caught:
            poptorch.inferenceModel(module, options())(torch.ones(2))
        assert private.CONTROL_FLOW in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES_OF[private.COMPILER])
def test_compiling_without(name: str, monkeypatch) -> None:
    remove(name, monkeypatch)
    with pytest.raises(private.Gone, match="has no torch"):
        Inductor().build(None)


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize("backend", ["optimise", "inductor"])
def test_the_reference_backend_takes_the_place_of_compiled_code(
    backend: str, monkeypatch, caplog, tmp_path
) -> None:
    remove(NAMES_OF[private.COMPILER][0], monkeypatch)
    monkeypatch.setattr(cache, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = poptorch.inferenceModel(nn.Linear(4, 2), options().backend(backend))
    x = normal(3, 4)
    torch.testing.assert_close(model(x), model.model(x))
    assert model._executable.report().backend == "reference"
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert VERSION in warning


@pytest.mark.slow
def test_a_compiler_process_says_it_too(monkeypatch, tmp_path) -> None:
    model = poptorch.inferenceModel(nn.Linear(4, 2), options())
    model(normal(3, 4))
    (graph,) = model.plan().program.graphs.values()
    remove(NAMES_OF[private.COMPILER][0], monkeypatch)
    encoded = helper.graph_json.encode(graph)
    outcome, why = helper.compiled("key", encoded, Inductor(), cache.Store(tmp_path))
    assert outcome == helper.FAILED
    assert VERSION in why


@pytest.mark.parametrize("name", NAMES_OF[private.KEPT_CODE])
def test_loading_code_without(name: str, monkeypatch) -> None:
    remove(name, monkeypatch)
    with pytest.raises(private.Gone, match="has no torch"):
        library.load(b"")


def test_calling_operators_of_others_without(monkeypatch) -> None:
    class Calling(nn.Module):
        def forward(self, x):
            return poptorch.custom_op([x], "plain", "without_shapes", 1, [x])[0]

    torch.library.define("without_shapes::plain", "(Tensor x) -> Tensor")
    torch.library.impl("without_shapes::plain", "cpu", lambda x: x * 2)
    remove("UnsupportedOperatorException", monkeypatch)
    with pytest.raises(poptorch.Error, match="has no torch"):
        poptorch.inferenceModel(Calling(), options())(torch.ones(2))


def test_the_earlier_name_of_a_name_is_taken(monkeypatch) -> None:
    path, lost = private.ROWS["CustomSchedulerPass"]
    monkeypatch.setitem(private.ROWS, "CustomSchedulerPass", (f"{path}_renamed", lost))
    assert private.CustomSchedulerPass is private.CustomGraphPass


PLACE = "check_build"  # in the place of this one


def of_torch() -> object:
    return getattr(private, PLACE)


def test_a_stand_in_is_there_within_the_block_only() -> None:
    usual, asked = of_torch(), []

    def stand_in(usual, self, code):
        asked.append((usual, self, code))
        return "stood in"

    with pytest.raises(KeyError), private.standing_in({PLACE: stand_in}):
        assert of_torch()("isa", code="text") == "stood in"
        raise KeyError
    assert asked == [(usual, "isa", "text")]
    assert of_torch() is usual


@pytest.mark.parametrize("way", ["gone", "other arguments"])
def test_no_stand_in_for_what_is_not_as_it_was(way: str, monkeypatch, caplog) -> None:
    usual = of_torch()
    stand_ins = {PLACE: lambda usual, self, code: None}
    if way == "gone":
        remove(PLACE, monkeypatch)
    else:
        stand_ins = {PLACE: lambda usual, self, source: None}
    with private.standing_in(stand_ins):
        assert private._resolve("torch._inductor.cpu_vec_isa:VecISA.check_build") is usual
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "check_build" in warning
    assert private.QUICK in warning
