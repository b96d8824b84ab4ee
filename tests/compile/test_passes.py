"""The passes of a compilation: their order, where a run stops, and that each result is verified."""

import dataclasses
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn

import poptorch
from helpers.captures import Chain
from helpers.wrapping import Having, Scaled, options, training
from poptorch import _compile
from poptorch._compile import passes, verifying
from poptorch._compile.bundled_weights import FlatParameters
from poptorch._compile.compilation import Compilation
from poptorch._compile.lanes import Batched
from poptorch._compile.passes import PASSES, observed
from poptorch._ir.compiler_pass import Pass, leaving_out
from poptorch._ir.plan import Layout

GIVEN = [field.name for field in dataclasses.fields(Compilation)][: -len(passes.MADE)]
X = torch.randn(8, 4)


def perceptron(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    parts = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
    return Having(lambda m, x: poptorch.identity_loss(m.parts(x).square(), "mean"), parts=parts)


def wrapped(
    model: nn.Module | None = None, opts: poptorch.Options | None = None
) -> poptorch.PoplarExecutor:
    model = model or perceptron()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    return poptorch.trainingModel(model, opts or options(accumulation=4), optimizer)


def steps_of(
    model: nn.Module | None = None, opts: poptorch.Options | None = None
) -> list[tuple[Pass, Compilation, Compilation]]:
    """Return each pass of a compilation, with the values before and after it."""
    steps = []
    with observed(lambda *step: steps.append(step)):
        wrapped(model, opts).compile(X)
    return steps


def compilation(opts: poptorch.Options | None = None) -> Compilation:
    return steps_of(opts=opts)[-1][2]


def only(made: Compilation, *names: str) -> Compilation:
    """Return a compilation with what it was given, and these values of its passes."""
    others = {name: None for name in passes.MADE if name not in names}
    return replace(made, **others)


def names_of(start: Compilation, stop: str) -> list[str]:
    """Return the names of the passes of a run."""
    seen = []
    with observed(lambda each, before, after: seen.append(each.name)):
        passes.run(start, stop=stop)
    return seen


# The list.


@pytest.mark.parametrize("each", PASSES, ids=lambda each: each.name)
def test_a_pass_needs_only_given_values_and_results_of_earlier_passes(each: Pass) -> None:
    earlier = {other.makes for other in PASSES[: PASSES.index(each)]}

    assert {*each.needs} <= {*GIVEN, *earlier}


FUNCTIONS = [(each, each.function) for each in PASSES] + [
    (each, each.without) for each in PASSES if each.without is not None
]


@pytest.mark.parametrize(
    "each, function", FUNCTIONS, ids=[function.__name__ for _, function in FUNCTIONS]
)
def test_a_function_takes_and_returns_the_types_of_the_values(
    each: Pass, function: Callable[..., Any]
) -> None:
    types = get_type_hints(Compilation, {**vars(_compile.compilation)})
    expected = {name: types[name] for name in passes.parameters(function)}
    expected["return"] = type(None) if each.makes is None else types[each.makes]

    assert get_type_hints(function) == expected


def test_names_of_optional_passes_are_unique() -> None:
    names = [name for each in PASSES for name in each.optional]

    assert len({*names}) == len(names)


@pytest.fixture
def log_of_a_compilation(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the messages of one compilation at the level TRACE."""
    poptorch.setLogLevel("TRACE")
    with caplog.at_level(logging.DEBUG, logger="poptorch:cpp"):
        training(Scaled(torch.tanh), options(accumulation=2)).compile(torch.randn(4))
    return caplog.messages


def test_each_pass_is_logged_in_its_order(log_of_a_compilation: list[str]) -> None:
    logged = [m.removeprefix("Pass ") for m in log_of_a_compilation if m.startswith("Pass ")]

    assert logged == [each.name for each in passes.PASSES]


def test_the_log_has_a_table_of_the_seconds_of_each_part(log_of_a_compilation: list[str]) -> None:
    (table,) = [m for m in log_of_a_compilation if m.startswith("Seconds spent in process")]

    _, head, *parts, total = table.splitlines()
    assert head.startswith("part")
    assert any(part.startswith("capture  ") for part in parts)
    assert total.startswith("all")


def test_graphs_are_logged_with_their_inputs(log_of_a_compilation: list[str]) -> None:
    graphs = [m for m in log_of_a_compilation if m.startswith("graph ")]

    assert graphs
    assert all("\n  in  param." in graph for graph in graphs)


# Where a run stops.


def test_a_run_returns_a_new_value_and_leaves_the_given_one_as_it_was() -> None:
    start = only(compilation(), "micro")

    done = passes.run(start, stop="place")

    assert start.layout is None
    assert done.layout is not None


def test_a_run_makes_only_the_values_that_its_last_pass_needs() -> None:
    start = only(compilation(), "micro")

    assert names_of(start, "build") == ["lanes", "place", "shard", "bundle", "build"]


def test_a_run_does_not_make_values_that_are_given() -> None:
    start = only(compilation(), "micro", "batched", "layout")

    assert names_of(start, "schedule") == ["trace update", "split", "schedule"]


def test_a_run_that_stops_makes_nothing_else() -> None:
    done = passes.run(only(compilation(), "micro"), stop="lanes")

    assert [name for name in passes.MADE if getattr(done, name) is not None] == ["micro", "batched"]


def passes_of(function: Callable[[], object]) -> list[str]:
    """Return the names of the passes that run in a function."""
    seen = []
    with observed(lambda each, before, after: seen.append(each.name)):
        function()
    return seen


def test_an_estimate_runs_the_passes_that_a_schedule_needs() -> None:
    executor = wrapped()

    seen = passes_of(lambda: executor.estimate(X))

    update = ["lanes", "trace update"]
    assert seen[:6] == [*update, "lanes", "place", "split", "schedule"]


def test_estimates_that_differ_in_locations_split_the_model_once() -> None:
    executor, places = wrapped(), ["on chip", "off chip"]
    vary = {"optimizer_location": places}

    seen = passes_of(lambda: poptorch.what_if(executor, X, vary=vary, progress=False))

    assert seen.count("schedule") > 1
    assert seen.count("split") == 1


def test_a_plan_of_stages_continues_from_the_compiled_layout() -> None:
    executor = wrapped(opts=options(accumulation=4).lanes(1))
    executor.compile(X)

    seen = passes_of(executor.plan)

    assert seen == ["lanes", "trace update", "split", "schedule"]


# Each result is verified.


def without_an_output(graph: Any) -> Any:
    return replace(graph, outputs=graph.outputs[1:])


def breaking(made: Any) -> Any:
    """Return what a pass has made with one slot too few."""
    if isinstance(made, Batched):
        return replace(made, micro=breaking(made.micro))
    if isinstance(made, passes.Program):
        return replace(made, graphs={k: without_an_output(g) for k, g in made.graphs.items()})
    return replace(made, graph=without_an_output(made.graph))


NOT_ALWAYS = (None, "optimizer_graphs", "split_step", "staged")
MAKING = [each.name for each in PASSES if each.makes not in NOT_ALWAYS]


@pytest.fixture(params=MAKING)
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A pass with a defect."""

    def planted(each: Pass) -> Pass:
        def function(**needs: Any) -> Any:
            return breaking(each.function(**needs))

        made = replace(each, function=function)
        made.__dict__["needs"] = each.needs
        return made

    name = request.param
    listed = tuple(planted(each) if each.name == name else each for each in PASSES)
    monkeypatch.setattr(passes, "PASSES", listed)
    return name


def test_a_defect_is_found_after_its_own_pass(broken: str) -> None:
    seen: list[str] = []

    with (
        observed(lambda each, before, after: seen.append(each.name)),
        pytest.raises(AssertionError, match="rule G1 broken"),
    ):
        wrapped().compile(X)

    assert seen == [each.name for each in PASSES][: [e.name for e in PASSES].index(broken)]


def test_a_graph_that_was_taken_over_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verified = []
    monkeypatch.setattr(verifying.verify, "verify_graph", verified.append)

    steps_of()

    assert len({*map(id, verified)}) == len(verified)


def test_the_stages_of_a_program_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps_of(Chain(("A", 0), ("B", 1)), options("staged", accumulation=4))[-1][2]
    verified = []
    monkeypatch.setattr(verifying.verify, "verify_graph", verified.append)

    done = passes.run(only(made, "micro"), stop="schedule")

    assert {*done.staged.graphs.values()} <= {*verified}


# Passes can be left out.


def left_out(name: str, layers: int = 20) -> tuple[Compilation, torch.Tensor]:
    """Return the values of a compilation without a pass, and the weights after two calls."""
    model, steps = perceptron(layers), []
    executor = wrapped(model)
    with leaving_out([name]), observed(lambda *step: steps.append(step)):
        executor.compile(X)
    for _ in range(2):
        executor(X)
    executor.copyWeightsToHost()
    weights = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    return steps[-1][2], weights


@pytest.fixture(scope="module")
def whole() -> tuple[Compilation, torch.Tensor]:
    return left_out("nothing")


def test_without_lanes_micro_batches_run_one_after_another(
    whole: tuple[Compilation, torch.Tensor],
) -> None:
    made, _ = left_out("lanes")

    assert whole[0].program.lanes is not None
    assert made.program.lanes is None


@pytest.mark.larger("test_without_lanes_micro_batches_run_one_after_another")
def test_without_bundles_weights_are_stored_separately(
    whole: tuple[Compilation, torch.Tensor],
) -> None:
    made, _ = left_out("bundle")

    assert whole[0].program.bundles
    assert not made.program.bundles


OPTIONAL = [name for each in PASSES for name in each.optional]


@pytest.mark.parametrize("name", OPTIONAL)
def test_results_are_the_same_without_a_pass(
    name: str, whole: tuple[Compilation, torch.Tensor]
) -> None:
    _, weights = left_out(name)

    torch.testing.assert_close(weights, whole[1])


def test_a_pass_whose_results_others_need_cannot_be_left_out() -> None:
    with pytest.raises(poptorch.Error, match="cannot be left out"):
        passes.check_names(["place"])


def test_the_error_lists_the_optional_passes() -> None:
    with pytest.raises(poptorch.Error, match=", ".join(OPTIONAL)):
        passes.check_names(["nonsense"])


def test_flat_parameters_of_inference_have_no_optimizer() -> None:
    steps: list[Any] = []
    with observed(lambda *step: steps.append(step)):
        poptorch.inferenceModel(nn.Linear(4, 4), options()).compile(X)

    made = steps[-1][2]

    assert isinstance(made.flat, FlatParameters)
    assert made.flat.optim is None


def test_the_layout_of_a_compilation_is_that_of_its_plan() -> None:
    made = compilation()

    assert isinstance(made.layout, Layout)
    assert made.plan().layout is made.layout
