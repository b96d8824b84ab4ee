"""A name that torch no longer has costs a warning or an error that says so, never an import."""

from __future__ import annotations

import functools
import logging
import pkgutil
from pathlib import Path

import pytest
import torch
from torch import nn

import poptorch
from helpers import programs
from helpers.wrapped import normal, options
from poptorch._base import private
from poptorch._capture import substitutes, value_reads
from poptorch._compile import cache as code
from poptorch._compile import helper, tiers
from poptorch.backends.inductor import Inductor, library

VERSION = f"torch {torch.__version__} has no torch."


def name_of(path: str) -> str:
    return next(name for name, (of_row, _) in private.ROWS.items() if of_row == path)


def lost_without(name: str) -> str:
    return private.ROWS[name][1]


REQUIRED, OPTIONAL = (
    {lost: [name_of(path) for path in paths] for lost, paths in table.items()}
    for table in (private.REQUIRED, private.OPTIONAL)
)
IN_COMPILER = (
    private.KEPT_CODE, private.PRODUCTS, lost_without("CppCompileError"),
    lost_without("layout_optimization"), lost_without("vec_isa_ok"),
)  # fmt: skip


def remove(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a name be gone, as after torch has renamed it and all its own uses."""
    path, lost = private.ROWS[name]
    monkeypatch.setitem(private.ROWS, name, (f"{path}_renamed", lost))


@pytest.fixture(autouse=True)
def _warnings_are_said_again(monkeypatch: pytest.MonkeyPatch):
    private._said.clear()
    substitutes.substitutes.cache_clear()
    yield
    substitutes.substitutes.cache_clear()


class Net(nn.Module):
    """With batch norm and a recurrent layer."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(3, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x, y):
        out = self.norm(self.rnn(x)[0][:, -1])
        return out, nn.functional.mse_loss(out, y)


def losses(net: type[nn.Module] = Net, backend: str = "reference") -> torch.Tensor:
    """Train a little with lanes."""
    torch.manual_seed(0)
    model = net()
    training = poptorch.trainingModel(
        model,
        options(accumulation=2).backend(backend).randomSeed(1),
        torch.optim.Adam(model.parameters(), lr=0.1),
    )
    taken = torch.stack([training(normal(8, 2, 3), normal(8, 4))[1] for _ in range(2)])
    assert training._executable.report().backend == backend.replace("optimise", "inductor")
    return taken


def test_all_names_are_there() -> None:
    assert [name for name in private.ROWS if not _is_there(private, name)] == []


def _is_there(module: object, name: str) -> bool:
    """Tell whether torch has what a row names; Gone is no AttributeError."""
    try:
        getattr(module, name)
    except private.Gone:
        return False
    return True


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
@pytest.mark.parametrize("name", REQUIRED[lost_without("make_fx")])
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
    ("lost", "name"),
    [
        (lost, name)
        for lost, names in OPTIONAL.items()
        if lost not in (*IN_COMPILER, lost_without("while_loop_op"))
        for name in names
    ],
)
def test_training_goes_on_without(lost: str, name: str, monkeypatch, caplog) -> None:
    """Each is a switch of its own: what is said is what is lost, the numbers stay."""
    wanted = usual()
    remove(name, monkeypatch)
    torch.testing.assert_close(losses(), wanted)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) <= 1
    assert all(VERSION in text and lost in text for text in said)
    if lost in (
        private.BACKWARD,
        lost_without("loader"),
        lost_without("get_graph_module_cls"),
        private.LINES,
    ):
        assert said


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """C++ that is the same is compiled once."""
    return tmp_path_factory.mktemp("torch")


class Small(nn.Module):
    """Compiles soon, has a product that oneDNN may compute and draws numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x, y):
        out = nn.functional.dropout(self.layer(x), 0.1).relu()[:, -1]
        return out, nn.functional.mse_loss(out, y)


@functools.cache
def compiled() -> torch.Tensor:
    """Return the losses of compiled code with all names."""
    return losses(Small, "optimise")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "name"), [(lost, name) for lost in IN_COMPILER for name in OPTIONAL[lost]]
)
def test_compiled_code_trains_without(lost: str, name: str, cache, monkeypatch, caplog) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)  # in this process
    wanted = compiled()
    remove(name, monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setattr(code.Store, "read", lambda self, key: None)
    torch.testing.assert_close(losses(Small, "optimise"), wanted)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(said) <= 1
    assert all(VERSION in text and lost in text for text in said)


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
        assert lost_without("while_loop_op") in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize("name", REQUIRED[private.COMPILER])
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
    remove(REQUIRED[private.COMPILER][0], monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
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
    remove(REQUIRED[private.COMPILER][0], monkeypatch)
    encoded = helper.graph_json.encode(graph)
    outcome, why = helper.compiled("key", encoded, Inductor(), code.Store(tmp_path))
    assert outcome == helper.FAILED
    assert VERSION in why


@pytest.mark.parametrize("name", OPTIONAL[private.KEPT_CODE])
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


def test_settings_that_are_gone_are_left_out_unless_they_are_needed(monkeypatch, caplog) -> None:
    import torch._inductor.config as config

    for name in ("reorder_for_locality", "vec_isa_ok", "fallback_random"):
        remove(name, monkeypatch)
    with private.settings({"reorder_for_locality": "other", "cpp_wrapper": "another"}):
        assert config.cpp_wrapper == "another"
        assert config.reorder_for_locality != "other"
    assert config.cpp_wrapper != "another"
    assert lost_without("layout_optimization") in caplog.text
    with (
        pytest.raises(private.Gone, match="fallback_random"),
        private.settings({"fallback_random": True}),
    ):
        pass


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
        assert pkgutil.resolve_name("torch._inductor.cpu_vec_isa:VecISA.check_build") is usual
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert "check_build" in warning
    assert lost_without("vec_isa_ok") in warning
