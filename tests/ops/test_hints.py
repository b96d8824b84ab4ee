"""Hints change no value; they are checked, and end up on the operators they are about."""

import collections
import functools

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Having, Scaled, agrees, graph_of, infer, options, training
from poptorch import OverlapMode

aten = torch.ops.aten
LOOP = OverlapMode.OverlapAccumulationLoop


def noted(executor, key: str, graph: str = "forward") -> dict:
    """Target of every node that carries a note, and the note."""
    notes = ((n.target, n.meta.get("custom") or {}) for n in graph_of(executor, graph).nodes)
    return {target: custom[key] for target, custom in notes if key in custom}


def marked(layer: nn.Module) -> Having:
    return Having(lambda model, x: poptorch.set_available_memory(model.layer(x), 0.25), layer=layer)


@pytest.mark.parametrize("layer, x, target", [
    (nn.Linear(3, 2), torch.randn(4, 5, 3), aten.addmm.default),
    (nn.Linear(3, 2, bias=False), torch.randn(4, 5, 3), aten.mm.default),
    (nn.Conv1d(3, 2, 1), torch.randn(4, 3, 5), aten.convolution.default),
    (nn.Embedding(5, 2), torch.randint(5, (4,)), aten.embedding.default),
    (nn.ReLU(), torch.randn(4, 3), None),
], ids=["linear", "no bias", "conv", "embedding", "another"])  # fmt: skip
def test_available_memory_is_noted_on_the_operator(layer, x, target, caplog) -> None:
    model = poptorch.inferenceModel(marked(layer), options())
    torch.testing.assert_close(model(x), layer(x))
    assert noted(model, "poptorch_available_memory") == ({target: 0.25} if target else {})
    assert all("hint" not in str(node.target) for node in graph_of(model).nodes)
    said = [m for m in caplog.messages if "poptorch.set_available_memory has no effect" in m]
    assert ["test_hints.py" in line for line in said] == [True] * (target is None)
    agrees(marked(layer), torch.cat([x, x]), opts=options(iterations=2))


@pytest.mark.spec("ops", 17)
@pytest.mark.spec("parallel", 29)
def test_checkpoint_keeps_the_container_and_marks_what_a_layer_returns() -> None:
    a, b = torch.ones(1), torch.zeros(1)
    Pair = collections.namedtuple("Pair", "first second")
    assert poptorch.recomputationCheckpoint(a) is a
    assert poptorch.recomputationCheckpoint(a, b) == (a, b)
    assert poptorch.recomputationCheckpoint([a, b]) == [a, b]
    assert type(poptorch.recomputationCheckpoint([a])) is list
    assert poptorch.recomputationCheckpoint((a,)) == (a,)
    assert type(poptorch.recomputationCheckpoint(Pair(a, b))) is Pair
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(lambda m, args, out: poptorch.recomputationCheckpoint(out))
    model = poptorch.inferenceModel(layer, options())
    model.compile(torch.randn(3, 2))
    assert noted(model, "poptorch_keep") == {aten.addmm.default: True}


def overlapping(tiles: bool = True) -> poptorch.Options:
    opts = options().outputMode(poptorch.OutputMode.All)
    opts.setExecutionStrategy(poptorch.ShardedExecution())
    if tiles:
        opts.TensorLocations.numIOTiles(32)
    return opts


@pytest.mark.spec("ops", 27)
def test_overlap_keeps_structure_and_values() -> None:
    def forward(x, pair):
        got = poptorch.set_overlap_for_input({"x": x, "pair": pair, "n": 3}, LOOP)
        assert got["n"] == 3
        a, b = got["pair"]
        total = got["x"] + a
        out = poptorch.set_overlap_for_output((total, [a * b]), LOOP)
        assert type(out) is tuple
        assert type(out[1]) is list
        return out, total * 2, out[0] * 3  # it may be used before and after

    x, a, b = torch.randn(3, 4)
    agrees(forward, x, (a, b), opts=overlapping())
    out, _ = training(Scaled(returned), overlapping())(x)
    assert torch.equal(out, 2 * x)
    agrees(lambda x: poptorch.set_overlap_for_input(x, OverlapMode.NoOverlap) + x, x)


given = functools.partial(poptorch.set_overlap_for_input, mode=LOOP)
returned = functools.partial(poptorch.set_overlap_for_output, mode=LOOP)


def source_returned_too(x):
    y = x + 1
    return returned(y), y


OVERLAPPING = overlapping()


@pytest.mark.spec("ops", 27)
@pytest.mark.parametrize("forward, opts, phrase", [
    (lambda x: given(x) + x, OVERLAPPING,
     "set_overlap_for_input must be the only op applied to an input"),
    (lambda x: given(x + 1), OVERLAPPING, "not a tensor input to the model"),
    (lambda x: returned(x + 1) * 2, OVERLAPPING, "not a tensor output to the model"),
    (source_returned_too, OVERLAPPING, "cannot be used with a tensor that is returned twice"),
    (lambda x: given(x) * 2,
     overlapping().setExecutionStrategy(poptorch.PipelinedExecution()),
     r"not supported with poptorch\.PipelinedExecution"),
    (lambda x: given(x) * 2, overlapping(tiles=False), "No IO tiles allocated"),
    (lambda x: given(x) * 2, overlapping().outputMode(poptorch.OutputMode.Final),
     "Unsupported output mode for over"),
])  # fmt: skip
def test_misplaced_overlap_and_missing_settings_are_errors(forward, opts, phrase: str) -> None:
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        infer(forward, torch.ones(2), opts=opts)
    assert opts is not OVERLAPPING or "test_hints.py" in str(caught.value)
