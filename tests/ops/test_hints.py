"""Hints of memory, recomputation and overlap: their effect on operators, and refused hints."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, Scaled, agrees, graph_of, infer, options, training
from poptorch import OverlapMode

aten = torch.ops.aten
LOOP = OverlapMode.OverlapAccumulationLoop


def notes(executor: poptorch.PoplarExecutor, key: str) -> dict[Any, Any]:
    """Return the target of every node that carries a note of this kind, and the note."""
    nodes = graph_of(executor).nodes
    custom = ((node.target, node.meta.get("custom") or {}) for node in nodes)
    return {target: noted[key] for target, noted in custom if key in noted}


# Available memory.


def marked(layer: nn.Module) -> Having:
    """Return a model of a layer whose result is given a quarter of the memory."""
    return Having(lambda model, x: poptorch.set_available_memory(model.layer(x), 0.25), layer=layer)


# By name: a layer, its input, and the operator that the hint is for.
HINTED = {
    "linear": (nn.Linear(3, 2), torch.randn(4, 5, 3), aten.addmm.default),
    "no bias": (nn.Linear(3, 2, bias=False), torch.randn(4, 5, 3), aten.mm.default),
    "conv": (nn.Conv1d(3, 2, 1), torch.randn(4, 3, 5), aten.convolution.default),
    "embedding": (nn.Embedding(5, 2), torch.randint(5, (4,)), aten.embedding.default),
}
NOT_HINTED = {"another": (nn.ReLU(), torch.randn(4, 3))}


@pytest.mark.parametrize("layer, x, target", HINTED.values(), ids=HINTED)
def test_available_memory_is_noted_on_the_operator(
    layer: nn.Module, x: torch.Tensor, target: object, caplog: pytest.LogCaptureFixture
) -> None:
    model = poptorch.inferenceModel(marked(layer), options())

    model.compile(x)

    assert notes(model, "poptorch_available_memory") == {target: 0.25}
    assert "poptorch.set_available_memory has no effect" not in caplog.text


def test_available_memory_of_another_operator_has_no_effect_and_a_warning_says_where(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = poptorch.inferenceModel(marked(nn.ReLU()), options())

    model.compile(torch.randn(4, 3))

    assert notes(model, "poptorch_available_memory") == {}
    warnings = [m for m in caplog.messages if "poptorch.set_available_memory has no effect" in m]
    assert len(warnings) == 1
    assert "test_hints.py" in warnings[0]


ANY_LAYER = [case[:2] for case in [*HINTED.values(), *NOT_HINTED.values()]]


@pytest.mark.parametrize("layer, x", ANY_LAYER, ids=[*HINTED, *NOT_HINTED])
def test_available_memory_changes_no_values_and_leaves_no_operator(
    layer: nn.Module, x: torch.Tensor
) -> None:
    model = poptorch.inferenceModel(marked(layer), options())

    torch.testing.assert_close(model(x), layer(x))

    assert [n for n in graph_of(model).nodes if "hint" in str(n.target)] == []


@pytest.mark.parametrize("layer, x", ANY_LAYER, ids=[*HINTED, *NOT_HINTED])
def test_available_memory_changes_no_values_of_lanes(layer: nn.Module, x: torch.Tensor) -> None:
    agrees(marked(layer), torch.cat([x, x]), opts=options(iterations=2))


# Checkpoints of recomputation.

A, B = torch.ones(1), torch.zeros(1)
Pair = collections.namedtuple("Pair", "first second")


@pytest.mark.spec("ops", 17)
def test_a_checkpoint_of_one_tensor_returns_it() -> None:
    assert poptorch.recomputationCheckpoint(A) is A


@pytest.mark.spec("ops", 17)
def test_a_checkpoint_of_several_arguments_returns_a_tuple() -> None:
    assert poptorch.recomputationCheckpoint(A, B) == (A, B)


@pytest.mark.spec("ops", 17)
@pytest.mark.parametrize("given", [[A, B], [A], (A,), Pair(A, B)], ids=repr)
def test_a_checkpoint_keeps_the_container(given: Any) -> None:
    got = poptorch.recomputationCheckpoint(given)

    assert type(got) is type(given)
    assert got == given


@pytest.mark.spec("ops", 17)
@pytest.mark.spec("parallel", 29)
def test_a_checkpoint_marks_the_results_of_a_layer() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda m, args, out: poptorch.recomputationCheckpoint(out))
    model = poptorch.inferenceModel(layer, options())

    model.compile(torch.randn(3, 2))

    assert notes(model, "poptorch_keep") == {aten.addmm.default: True}


# Overlap of inputs and outputs with computing.

overlapped_input = functools.partial(poptorch.set_overlap_for_input, mode=LOOP)
overlapped_output = functools.partial(poptorch.set_overlap_for_output, mode=LOOP)


def overlapping(tiles: bool = True) -> poptorch.Options:
    """Return options that overlap needs, with tiles for it or without."""
    opts = options().outputMode(poptorch.OutputMode.All)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    if tiles:
        opts.TensorLocations.numIOTiles(32)
    return opts


@pytest.mark.spec("ops", 27)
def test_overlap_keeps_the_structure_of_inputs_and_outputs() -> None:
    seen = {}

    def forward(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        seen["input"] = overlapped_input({"x": x, "pair": pair, "n": 3})
        a, b = seen["input"]["pair"]
        seen["output"] = overlapped_output((seen["input"]["x"] + a, [b + 1]))
        return seen["output"]

    x, a, b = torch.randn(3, 4)

    infer(forward, x, (a, b), opts=overlapping())

    assert seen["input"]["n"] == 3
    assert type(seen["input"]["pair"]) is tuple
    assert type(seen["output"]) is tuple
    assert type(seen["output"][1]) is list


@pytest.mark.spec("ops", 27)
def test_overlap_keeps_values_and_outputs_may_be_used_before_and_after() -> None:
    def forward(x: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        given = overlapped_input({"x": x, "pair": pair})
        a, b = given["pair"]
        total = given["x"] + a
        out = overlapped_output((total, [a * b]))
        return out, total * 2, out[0] * 3

    x, a, b = torch.randn(3, 4)

    agrees(forward, x, (a, b), opts=overlapping())


@pytest.mark.spec("ops", 27)
def test_overlap_of_an_output_keeps_values_in_training() -> None:
    x = torch.randn(4)

    out, _ = training(Scaled(overlapped_output), overlapping())(x)

    assert torch.equal(out, 2 * x)


@pytest.mark.spec("ops", 27)
def test_no_overlap_needs_no_options_and_is_allowed_for_any_use() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return poptorch.set_overlap_for_input(x, OverlapMode.NoOverlap) + x

    agrees(forward, torch.randn(4))


def output_and_its_source(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a tensor with overlap and without."""
    y = x + 1
    return overlapped_output(y), y


@pytest.mark.spec("ops", 27)
@pytest.mark.parametrize(
    "forward, phrase",
    [
        pytest.param(
            lambda x: overlapped_input(x) + x,
            "set_overlap_for_input must be the only op applied to an input",
            id="input used otherwise",
        ),
        pytest.param(
            lambda x: overlapped_input(x + 1), "not a tensor input to the model", id="no input"
        ),
        pytest.param(
            lambda x: overlapped_output(x + 1) * 2,
            "not a tensor output to the model",
            id="no output",
        ),
        pytest.param(
            output_and_its_source,
            "cannot be used with a tensor that is returned twice",
            id="returned twice",
        ),
    ],
)
def test_overlap_of_intermediate_tensors_is_refused_at_its_line(
    forward: Callable[[torch.Tensor], Any], phrase: str
) -> None:
    with pytest.raises(poptorch.Error, match=phrase) as refused:
        infer(forward, torch.ones(2), opts=overlapping())

    assert "test_hints.py" in str(refused.value)


@pytest.mark.spec("ops", 27)
@pytest.mark.parametrize(
    "opts, phrase",
    [
        pytest.param(
            overlapping().setExecutionStrategy(poptorch.PipelinedExecution()),
            r"not supported with poptorch\.PipelinedExecution",
            id="pipeline",
        ),
        pytest.param(overlapping(tiles=False), "No IO tiles allocated", id="no tiles"),
        pytest.param(
            overlapping().outputMode(poptorch.OutputMode.Final),
            "Unsupported output mode for over",
            id="output mode",
        ),
    ],
)
def test_overlap_without_the_options_that_it_needs_is_refused(
    opts: poptorch.Options, phrase: str
) -> None:
    with pytest.raises(poptorch.Error, match=phrase):
        infer(lambda x: overlapped_input(x) * 2, torch.ones(2), opts=opts)
