"""A name that torch no longer has costs a warning or an error that says so, never an import."""

import functools
import logging
import pkgutil

import pytest
import torch

import poptorch
from helpers import programs
from helpers.cases import long
from helpers.wrapping import Having, infer, normal, options, runs_compiled
from poptorch._base import private
from poptorch._capture import substitutes
from poptorch._compile import cache as code
from poptorch._compile import tiers
from poptorch.backends.inductor import Inductor, library

VERSION = f"torch {torch.__version__} has no torch."


def name_of(path: str) -> str:
    return next(name for name, (of_row, _) in private.ROWS.items() if of_row == path)


def lost_without(name: str) -> str:
    return private.ROWS[name][1]


REQUIRED, OPTIONAL = ({lost: [name_of(path) for path in paths] for lost, paths in table.items()}
                      for table in (private.REQUIRED, private.OPTIONAL))  # fmt: skip
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


def net() -> Having:
    """With batch norm and a recurrent layer."""

    def forward(model, x, y):
        out = model.norm(model.rnn(x)[0][:, -1])
        return out, torch.nn.functional.mse_loss(out, y)

    return Having(forward, rnn=torch.nn.GRU(3, 4, batch_first=True), norm=torch.nn.BatchNorm1d(4))


def small() -> Having:
    """Compiles soon, has a product that oneDNN may compute and draws numbers."""

    def forward(model, x, y):
        out = torch.nn.functional.dropout(model.layer(x), 0.1).relu()[:, -1]
        return out, torch.nn.functional.mse_loss(out, y)

    return Having(forward, layer=torch.nn.Linear(3, 4))


def losses(make, backend: str = "reference") -> torch.Tensor:
    """Train a little with lanes."""
    torch.manual_seed(0)
    model = make()
    optimizer = (torch.optim.Adam if make is net else torch.optim.SGD)(model.parameters(), lr=0.1)
    opts = options(accumulation=2).backend(backend).randomSeed(1)
    training = poptorch.trainingModel(model, opts, optimizer)
    taken = torch.stack([training(normal(8, 2, 3), normal(8, 4))[1] for _ in range(2)])
    assert runs_compiled(training) == (backend != "reference")
    return taken


usual = functools.cache(losses)  # with all names
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


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory):
    """C++ that is the same is compiled once."""
    return tmp_path_factory.mktemp("torch")


ELSEWHERE = (private.COMPILER, lost_without("while_loop_op"))  # a test of their own, below
_SAID = "setup_stacktrace_preservation_hooks loader get_graph_module_cls create_node"
ALWAYS_SAID = set(map(lost_without, _SAID.split()))
ALONE = [n for lost, names in (REQUIRED | OPTIONAL).items() for n in names if lost not in ELSEWHERE]
IN_CAPTURE = [name for name in ALONE if lost_without(name) not in (*REQUIRED, *IN_COMPILER)]
TOGETHER = [name for lost in IN_COMPILER[:-1] for name in OPTIONAL[lost]]  # the last are settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [["FakeTensorMode"], IN_CAPTURE, TOGETHER, *(long([name]) for name in ALONE)],
    ids=lambda names: names[0] if len(names) == 1 else f"{len(names)} names",
)  # fmt: skip
def test_training_without(names: list[str], cache, monkeypatch, caplog) -> None:
    """The usual numbers and warnings of what is lost, or an error with the version."""
    lost = {lost_without(name) for name in names}
    model, backend = net, "reference"
    if lost <= set(IN_COMPILER):
        model, backend = small, "optimise"
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
        monkeypatch.setattr(tiers._cores, "idle", lambda: 0.0)  # in this process
    wanted = usual(model)
    for name in names:
        remove(name, monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setattr(code.Store, "read", lambda self, key: None)
    refusal = ""
    try:
        torch.testing.assert_close(losses(model, backend), wanted)
    except poptorch.Error as error:
        refusal = error.message
    assert not refusal or (lost <= set(REQUIRED) and VERSION in refusal and "Fix:" in refusal)
    said = [r.message for r in caplog.records if r.name == "poptorch::python"]
    assert len(said) <= len(names)
    assert all(VERSION in text and any(each in text for each in lost) for text in said)
    assert all(any(each in text for text in said) for each in lost & ALWAYS_SAID)


torch.library.define("without_shapes::plain", "(Tensor x) -> Tensor")
torch.library.impl("without_shapes::plain", "cpu", lambda x: x * 2)


@pytest.mark.parametrize("name, function", [
    ("while_loop_op", lambda x: poptorch.for_loop(3, lambda x: x * 2, [x])[0]),
    ("cond_op", lambda x: poptorch.cond(x.sum() > 0, lambda: x * 2, [], lambda: x, [])[0]),
    ("UnsupportedOperatorException",
     lambda x: poptorch.custom_op([x], "plain", "without_shapes", 1, [x])[0]),
])  # fmt: skip
def test_operators_without(name: str, function, monkeypatch) -> None:
    remove(name, monkeypatch)
    with pytest.raises(poptorch.Error, match="has no torch") as caught:
        infer(function, torch.ones(2))
    assert lost_without(name) in caught.value.message


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, use",
    [*((name, lambda: Inductor().build(None)) for name in REQUIRED[private.COMPILER]),
     *((name, lambda: library.load(b"")) for name in OPTIONAL[private.KEPT_CODE])],
)  # fmt: skip
def test_compiling_and_loading_code_without(name: str, use, monkeypatch) -> None:
    remove(name, monkeypatch)
    with pytest.raises(private.Gone, match="has no torch"):
        use()


@pytest.mark.slow
@pytest.mark.compiling_fails
@pytest.mark.parametrize("backend", ["optimise", "inductor"])
def test_the_interpreter_takes_the_place_of_compiled_code(backend, monkeypatch, caplog, tmp_path):
    remove(REQUIRED[private.COMPILER][0], monkeypatch)
    monkeypatch.setattr(code, "_loaded", {})
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = poptorch.inferenceModel(torch.nn.Linear(4, 2), options().backend(backend))
    x = normal(3, 4)
    torch.testing.assert_close(model(x), model.model(x))
    assert not runs_compiled(model)
    (warning,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert VERSION in warning


def test_settings_that_are_gone_are_left_out_unless_they_are_needed(monkeypatch, caplog) -> None:
    import torch._inductor.config as config

    for name in ("reorder_for_locality", "vec_isa_ok", "fallback_random"):
        remove(name, monkeypatch)
    with private.settings({"reorder_for_locality": "other", "cpp_wrapper": "another"}):
        assert config.cpp_wrapper == "another"
        assert config.reorder_for_locality != "other"
    assert config.cpp_wrapper != "another"
    assert lost_without("layout_optimization") in caplog.text
    with pytest.raises(private.Gone, match="fallback_random"):
        private.settings({"fallback_random": True}).__enter__()


@pytest.mark.parametrize("way", ["there", "gone", "other arguments"])
def test_a_stand_in_is_there_within_the_block_only(way: str, monkeypatch, caplog) -> None:
    usual, asked = private.check_build, []

    def stand_in(usual, self, code):
        asked.append((usual, self, code))

    if way == "gone":
        remove("check_build", monkeypatch)
    function = (lambda usual, self, source: None) if way == "other arguments" else stand_in
    with pytest.raises(KeyError), private.standing_in({"check_build": function}):
        now = pkgutil.resolve_name("torch._inductor.cpu_vec_isa:VecISA.check_build")
        if way == "there":
            now("isa", code="text")
        assert (now is usual) == (way != "there")
        raise KeyError
    assert asked == ([(usual, "isa", "text")] if way == "there" else [])
    assert pkgutil.resolve_name("torch._inductor.cpu_vec_isa:VecISA.check_build") is usual
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert ["check_build" in text for text in said] == [True] * (way != "there")
    assert all(lost_without("vec_isa_ok") in text for text in said)
