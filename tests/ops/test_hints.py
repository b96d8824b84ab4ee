"""Hints, names, scopes and autocast: what operators are told, and what of it is refused."""

import collections
import contextlib
import functools
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import poptorch
from helpers.closeness import near
from helpers.wrapping import (
    Calling,
    Having,
    Scaled,
    agrees,
    graph_of,
    infer,
    options,
    training,
    unchecked,
)
from poptorch import MultiConv, MultiConvPartialsType, MultiConvPlanType, OverlapMode
from poptorch._ir.blocks import label_of
from poptorch.autocasting import Policy

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


HALF, FLOAT = torch.float16, torch.float32
GROUP = MultiConv()


def test_name_scopes_nest_and_end_with_an_exception() -> None:
    def forward(x):
        with poptorch.NameScope("outer"):
            x = x + 1
            with contextlib.suppress(RuntimeError), poptorch.NameScope("inner"):
                x = x * 2
                raise RuntimeError
            x = x - 3
        return x.exp()

    model = poptorch.inferenceModel(Calling(forward), options())
    model.compile(torch.ones(1))
    named = [(n.name, label_of(n).path) for n in graph_of(model).nodes if label_of(n).path]
    assert named == [("add", "outer"), ("mul", "outer/inner"), ("sub", "outer")]
    with poptorch.NameScope("native") as scope:
        assert isinstance(scope, poptorch.NameScope)


def test_users_see_the_scope_in_names_estimates_and_errors() -> None:
    def scoped(model, x):
        with poptorch.NameScope("encoder"):
            x = model.fc(x).sqrt()
            model.fc(x)
        return x, poptorch.identity_loss(x, reduction="mean")

    opts = options()
    opts.anchorTensor("first", "encoder/fc/Linear")
    opts.anchorTensor("second", "fc")
    opts.Precision.enableFloatingPointExceptions(True)
    model, x = Having(scoped, fc=nn.Linear(2, 2)), torch.ones(1, 2)
    nn.init.ones_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    training = poptorch.trainingModel(model, opts)
    training(x)
    names = training.getTensorNames()
    assert [n for n in names if "Linear" in n] == ["encoder/fc/Linear", "encoder/fc/Linear/1"]
    for name in ("first", "second"):
        assert training.getAnchoredTensor(name).tolist() == [[2.0, 2.0]]
    assert {"encoder", "encoder/fc"} <= {o.module for o in training.estimate(x).operators}
    with pytest.raises(poptorch.Error, match="of module encoder"):
        training(-x)


def both(model, x):
    with model.group:
        return model.a(x) * model.b(x.relu())


def none(model, x):
    with model.group:
        x = x + 1
    return model.a(x)


def nested(model, x):
    with model.group, MultiConv():
        return model.a(x)


def convs(group: MultiConv, forward=both, channels=2, outs=3, size=1) -> Having:
    a, b = (nn.Conv1d(channels, outs, size) for _ in range(2))
    return Having(forward, group=group, a=a, b=b)


X = torch.randn(2, 2, 4)
MIXED = MultiConv().availableMemoryProportions((0.1, 0.2))
MIXED.partialsTypes([HALF, MultiConvPartialsType.Float])


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize(
    "group, noted",
    [
        (
            MIXED,
            {
                "available memory 0.1, partials type torch.float16",
                "available memory 0.2, partials type torch.float32",
            },
        ),
        (MultiConv().partialsTypes(MultiConvPartialsType.Half), {"partials type torch.float16"}),
    ],
)
def test_multi_conv_options_are_in_the_plan_and_the_profile(group, noted, tmp_path) -> None:
    model = poptorch.inferenceModel(convs(group), options().enableProfiling(str(tmp_path)))
    model(X)
    lines = [line for line in str(model.plan()).splitlines() if "partials type" in line]
    assert {line.partition("): ")[2] for line in lines} == noted
    model.destroy()
    settings = json.loads((tmp_path / "inference" / "profile.json").read_text())["settings"]
    assert noted <= set(settings.values())


def test_multi_conv_options_change_the_estimate() -> None:
    def cycles(group: MultiConv) -> float:
        module = convs(group, both, 64, 512, 9).half()  # a chip's memory matters to it
        model = poptorch.inferenceModel(module, options())
        return model.estimate(torch.zeros(4, 64, 1024).half()).cycles

    plain = cycles(MultiConv())
    assert cycles(MultiConv().availableMemoryProportions((0.05, 0.05))) != plain
    assert cycles(MultiConv().partialsTypes([HALF, FLOAT])) != plain


def test_a_multi_conv_without_options_says_nothing(caplog) -> None:
    poptorch.inferenceModel(convs(MultiConv()), options())(torch.zeros(1, 2, 4))
    assert "MultiConv" not in caplog.text


def test_multi_conv_says_what_has_no_effect(caplog) -> None:
    group = MultiConv().perConvReservedTiles(100).cycleBackOff(0.3).availableMemoryProportions(0.1)
    # Dithering has its default again.
    group.planType(MultiConvPlanType.Serial).enableConvDithering(True).enableConvDithering(None)
    agrees(convs(group), X)
    (line,) = [text for text in caplog.messages if "poptorch.MultiConv" in text]
    assert "no effect: cycleBackOff, perConvReservedTiles, planType (" in line
    caplog.clear()
    agrees(convs(MultiConv()), X)
    assert [text for text in caplog.messages if "no effect" in text] == []  # of what nobody set


@pytest.mark.spec("ops", 24)
@pytest.mark.parametrize(
    "group, forward, phrase",
    [
        (GROUP, none, "Unexpected end_multi_conv"),
        (MultiConv(), nested, r"Nested poptorch\.MultiConv is not supported"),
        (
            MultiConv().availableMemoryProportions([0.1] * 3),
            both,
            "differs from the number of convolutions",
        ),
    ],
)
def test_multi_conv_rules_are_checked_at_compilation(group, forward, phrase: str) -> None:
    module = convs(group, forward)
    module(X)  # without a wrapper it has no effect
    with pytest.raises(poptorch.Error, match=phrase) as caught:
        poptorch.inferenceModel(module, options()).compile(X)
    assert "test_hints.py" in str(caught.value)
    if group is GROUP:  # it stays usable
        agrees(convs(group), X)


def dtypes(results):
    return [result.dtype for result in results]


def classifying(model, x, labels):
    with poptorch.autocast():
        out = model.layer(x)
    return out, F.cross_entropy(out.float(), labels)


@pytest.mark.parametrize("accumulation, enabled", [(4, True), (1, False)])
def test_products_run_in_half_unless_switched_off(accumulation, enabled):
    model = Having(classifying, layer=nn.Linear(3, 2))
    x, labels = torch.randn(8, 3), torch.arange(8) % 2
    with torch.autocast("cpu", HALF, enabled):
        want = model.layer(x).detach()
    # Eager PyTorch has no autocast of poptorch's.
    opts = unchecked(accumulation=accumulation).outputMode(poptorch.OutputMode.All)
    assert opts.Precision.autocastEnabled(enabled) is opts.Precision
    with pytest.raises(AssertionError):
        opts.Precision.autocastEnabled("yes")
    out, loss = training(model, opts)(x, labels)
    assert loss.dtype == FLOAT
    torch.testing.assert_close(out, want, **near(1, dtype=HALF))
    assert model.layer.weight.dtype == FLOAT


def test_it_nests_as_torchs_own_does():
    @poptorch.autocast()
    def forward(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            low = F.linear(x, w), F.softmax(x, -1)
        with poptorch.autocast(enabled=False):
            return *low, F.linear(x, w), torch.relu(F.linear(x, w))

    with poptorch.autocast():
        assert torch.mm(torch.eye(2), torch.eye(2)).dtype == HALF
    got = agrees(forward, torch.randn(4, 3), torch.randn(2, 3), **near(1, dtype=torch.bfloat16))
    assert dtypes(got) == [torch.bfloat16, FLOAT, FLOAT, FLOAT]


def test_a_policy_chooses_the_functions():
    opts = options()
    policy = Policy(fp16=[torch.add], fp32=[nn.Linear], promote=[torch.mul], demote=["sub"])
    assert opts.Precision.autocastPolicy(policy) is opts.Precision

    @poptorch.autocast()
    def forward(x, h, w):
        products = F.linear(h, w), torch.mul(x, h), torch.mul(h, h)
        return torch.add(x, x), *products, torch.sub(x, h), torch.sub(x, x), torch.matmul(x, w.t())

    x, w = torch.randn(4, 3), torch.randn(2, 3)
    got = infer(forward, x, x.half(), w, opts=opts)
    assert dtypes(got) == [HALF, FLOAT, FLOAT, HALF, HALF, FLOAT, HALF]
    torch.testing.assert_close(got[0], (x + x).half())
    policy = Policy(fp16=[nn.LayerNorm, nn.BatchNorm2d, nn.CrossEntropyLoss, nn.GELU], fp32=["mm"])
    assert policy.fp16 == ["layer_norm", "batch_norm", "cross_entropy", "gelu"]
    opts, norm = options(), nn.LayerNorm(3)
    opts.Precision.autocastPolicy(Policy(fp16=[nn.LayerNorm]))
    got = infer(poptorch.autocast()(lambda x: norm(x)), x, opts=opts)
    assert torch.equal(got, F.layer_norm(x.half(), (3,), norm.weight.half(), norm.bias.half()))


def test_surroundings_that_cast_are_those_of_a_call_and_do_not_reach_the_program() -> None:
    def forward(a, b):
        with torch.autocast("cpu", enabled=False):
            whole = a @ b
        return whole, a @ b

    a, b = torch.eye(3).repeat(2, 1), torch.full((6, 3), 1 + 2**-20)
    executor = poptorch.inferenceModel(Calling(forward), options(iterations=2))
    for kind in (HALF, FLOAT, torch.bfloat16, FLOAT):
        with torch.autocast("cpu", kind, enabled=kind is not FLOAT):
            whole, cast = executor(a, b)
        assert whole.dtype == FLOAT
        assert cast.dtype == kind
        assert torch.equal(whole, b)
