"""What calls take and return: binding, containers, constants; counters, cycles, names, anchors."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import math
import sys
import types

import pytest
import torch
from torch import nn

import poptorch
from helpers.beside import ROWS, Eager, Ours, Way
from helpers.wrapping import (
    Calling,
    Graded,
    Having,
    inference,
    normal,
    options,
    saved,
    unchecked,
)
from poptorch import OutputMode
from poptorch._data import combining


def with_loss() -> nn.Module:
    torch.manual_seed(1)
    return Graded(both=True, layer=nn.Linear(3, 2))


SHAPES = [
    # iterations, accumulation, replicas, mode, period, how many predictions come back, loss
    (1, 1, 1, "Default", 1, 1, ()),
    (2, 2, 2, "All", 1, 8, (8,)),
    (2, 1, 4, "Final", 1, 4, (4,)),
    (4, 2, 2, "EveryN", 2, 8, (8,)),
    (2, 2, 2, "Sum", 1, 2, (2,)),
]


def test_sums_of_one_micro_batch_are_as_wide_as_of_several() -> None:
    model = Calling(lambda x: x > 0)
    executor = poptorch.inferenceModel(model, options().outputMode(OutputMode.Sum))
    for _ in range(3):
        assert executor(torch.tensor([1.0, -1.0])).dtype is torch.int32


@pytest.mark.spec("executor", 10, 11, 12, 13, 14, 45)
@pytest.mark.spec("programs", 13, 14, 26)
@pytest.mark.parametrize(("d", "g", "r", "mode", "period", "count", "loss"), SHAPES)
def test_shapes_contents_and_counters_of_outputs(d, g, r, mode, period, count, loss) -> None:
    way = Way(iterations=d, accumulation=g, replicas=r, mode=mode, period=period)
    eager = Eager(with_loss, lambda results: results[1], way)
    training = Ours(with_loss, way).wrapper
    x, y = torch.randn(way.rows, 3), torch.randn(way.rows, 2)
    empty = training.getPerfCounters()
    assert empty == {k: [[]] for k in ("input", "input_complete", "output", "output_complete")}
    assert training.getLatency() == (0.0, 0.0, 0.0)
    out, got = training(x, y)
    assert out.shape == (count * ROWS, 2)
    assert got.shape == loss
    torch.testing.assert_close((out, got), eager(x, y))
    counters = training.getPerfCounters()
    for key, stamps in (("input", d * g * r), ("output", count)):
        for name in (key, f"{key}_complete"):
            assert [len(each) for each in counters[name]] == [stamps] * 2
    of_parts = training.getHostIpuLatency, training.getComputeLatency, training.getIpuHostLatency
    parts = [latency() for latency in of_parts]
    assert all(0 <= part[0] <= part[2] <= part[1] for part in parts)
    assert [sum(each) for each in zip(*parts, strict=True)] == pytest.approx(training.getLatency())


@pytest.mark.spec("executor", 14, 48, 65)
def test_all_outputs_of_inference_line_up_with_the_inputs() -> None:
    x = torch.arange(24.0).reshape(12, 2)
    assert torch.equal(inference(lambda x: x * 2, iterations=3, replicas=2)(x), x * 2)
    assert torch.equal(inference(lambda x: x.sum().reshape(1), iterations=12)(x[:, 0]), x[:, 0])

    def losses(x, y):  # two are fine
        return nn.functional.mse_loss(x, y), nn.functional.l1_loss(x, y)

    torch.testing.assert_close(inference(losses)(x, x + 2), losses(x, x + 2))


@pytest.mark.spec("executor", 49)
def test_results_have_no_history_and_say_so() -> None:
    out, loss = poptorch.trainingModel(with_loss(), options())(torch.randn(2, 3), torch.randn(2, 2))
    for result in (out, loss):
        assert type(result) is torch.Tensor
        assert not result.requires_grad
        with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
            result.backward()
    for again in (saved(out), copy.deepcopy(out)):
        assert torch.equal(again, out)
    leaf = (out * 2).requires_grad_()
    leaf.sum().backward()  # what is computed from it on the host is ordinary
    assert leaf.grad is not None


def test_results_never_share_storage() -> None:
    def forward(module, x):
        y = x + 1
        return y, y, y.view(-1, 2)[:1], x, x[:1], module.weight, module.weight.t()

    x = torch.randn(2, 2)
    wrapped = inference(Having(forward, weight=nn.Parameter(torch.ones(2, 2))))
    got = wrapped(x)
    expected = [t.clone() for t in got]
    for result in got:
        result.fill_(9)
        assert all((t == 9).all() or torch.equal(t, e) for t, e in zip(got, expected, strict=True))
    assert len({t.data_ptr() for t in got}) == len(got)
    assert not (x == 9).any()
    assert torch.equal(wrapped(x)[5], torch.ones(2, 2))
    assert all((t == 9).all() for t in got)  # results of earlier calls stay


def test_tensors_of_the_host_come_back_as_they_are() -> None:
    module = Calling(lambda x: (x, module.note, x + 1))
    module.note = torch.arange(3)
    wrapped = inference(module, iterations=2)
    with pytest.warns(UserWarning, match="Output expected to be on the IPU"):
        _, note, last = wrapped(torch.zeros(4, 1))
    assert torch.equal(note, torch.arange(3))  # neither batched nor narrowed
    assert note.dtype == torch.int64
    assert last.shape == (4, 1)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1])
def test_an_integer_beyond_32_bits_is_an_error(value: int) -> None:
    number, wrapped = torch.tensor([value]), inference(lambda x: {"half": x / 2, "same": x})
    with pytest.raises(poptorch.Error, match=rf"(?s)into 32 bits.*same.*{value} to {value}"):
        wrapped(number)
    border = number.clamp(-(2**31), 2**31 - 1)
    result = wrapped(border)["same"]
    assert result.dtype == torch.int32
    assert result.tolist() == border.tolist()
    opts = options()
    opts.Precision.narrow64Bit(False)
    wide = poptorch.inferenceModel(lambda x: x + 1, opts)(number)
    assert wide.dtype == torch.int64
    assert wide.item() == value + 1


def net() -> nn.Module:
    return Graded(both=True, body=nn.Sequential(nn.Linear(3, 4), nn.ReLU()), head=nn.Linear(4, 2))


def batch(rows: int):
    return torch.randn(rows, 3), torch.randn(rows, 2)


@pytest.mark.spec("runtime", 19, 20)
def test_compile_time_and_cycles(capsys) -> None:
    quiet = inference(lambda x: x)
    with pytest.raises(poptorch.Error, match="Please compile the model"):
        quiet.compilationTime()
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        quiet.cycleCount()
    quiet(torch.ones(2))
    assert capsys.readouterr().err == ""
    with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
        quiet.compilationTime()
    opts = options().showCompilationProgressBar().logCycleCount(True)
    shown = poptorch.inferenceModel(lambda x: x, opts)
    shown.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        shown.cycleCount()
    shown(torch.ones(2))
    assert "Graph compilation: 100%" in capsys.readouterr().err
    assert isinstance(shown.compilationTime(), datetime.timedelta)
    assert shown.cycleCount() > 0


ANCHORS = {
    "x": "input",
    "loss": "loss",
    "weight": "head.weight",
    "grad": "Gradient___head.weight",
    "new": "UpdatedVar___head.weight",
    "hidden": "body/1/ReLU",
    "module": "body.0",
}


def test_anchored_tensors() -> None:
    model = net()
    eager, opts = copy.deepcopy(model), options()
    for short, long in ANCHORS.items():
        opts.anchorTensor(short, long)
    training = poptorch.trainingModel(model, opts, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AssertionError, match="No tensor with name"):
        training.getAnchoredTensor("x")
    with pytest.raises(AssertionError, match="once the model is compiled"):
        training.getTensorNames()
    x, y = batch(2)
    out, loss = training(x, y)
    eager(x, y)[1].backward()
    weight, hidden = eager.head.weight.detach(), eager.body(x).detach()
    expected = {
        "x": x,
        "loss": loss,
        "weight": weight,
        "grad": eager.head.weight.grad,
        "hidden": hidden,
        "new": weight - 0.1 * eager.head.weight.grad,
        "module": eager.body[0](x).detach(),
    }
    assert out.shape == (2, 2)
    for short, value in expected.items():
        torch.testing.assert_close(training.getAnchoredTensor(short), value)
    with pytest.raises(AssertionError, match="No tensor with name other"):
        training.getAnchoredTensor("other")
    names = {"input/1", "head/Linear", "scaledLearningRate0___specific___head.weight"}
    assert {*ANCHORS.values()} - {"body.0"} | names <= {*training.getTensorNames()}
    plain = poptorch.inferenceModel(net(), options().disableModuleNamescope())
    plain(*batch(2))
    assert "Linear" in plain.getTensorNames()
    assert "head/Linear" not in plain.getTensorNames()


def test_anchors_have_output_modes_of_their_own() -> None:
    opts = options(iterations=4, accumulation=2, replicas=2)
    opts.anchorTensor("final", "input")
    opts.anchorTensor("all", "input", output_mode=OutputMode.All)
    opts.anchorTensor("second", "input", output_mode=OutputMode.EveryN, output_return_period=2)
    opts.anchorTensor("sum", "input", output_mode=OutputMode.Sum)
    opts.anchorTensor("new", "UpdatedVar___head.bias", output_mode=OutputMode.All)
    model = net()
    training = poptorch.trainingModel(model, opts)
    x, y = batch(16)
    training(x, y)
    assert torch.equal(training.getAnchoredTensor("all"), x)
    assert torch.equal(training.getAnchoredTensor("final"), x[-2:])
    assert torch.equal(training.getAnchoredTensor("second"), torch.cat([x[4:8], x[12:16]]))
    sums = torch.stack([x[0::2].sum(0), x[1::2].sum(0)])
    torch.testing.assert_close(training.getAnchoredTensor("sum"), sums)
    new = training.getAnchoredTensor("new")
    assert new.shape == (8,)  # one per update
    assert torch.equal(new[-2:], model.head.bias.detach())


def test_the_norm_of_the_gradients_is_that_before_clipping() -> None:
    model = net()
    eager, opts = copy.deepcopy(model), options(accumulation=4)
    opts.anchorTensor("norm", "GradientNorm")
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, max_grad_norm=0.01)
    training = poptorch.trainingModel(model, opts, optimizer)
    native = torch.optim.SGD(eager.parameters(), lr=0.1)
    x, y = batch(8)
    for _ in range(2):
        training(x, y)
        native.zero_grad()
        eager(x, y)[1].backward()
        norm = nn.utils.clip_grad_norm_(eager.parameters(), 0.01)
        native.step()
        torch.testing.assert_close(training.getAnchoredTensor("norm"), norm)
    assert training.plan().program.lanes is not None  # it costs no lanes
    close = "(?s)No tensor.*did you mean Gradient___head.weight or "
    opts = options()
    opts.anchorTensor("anchor", "Gradient___heads.weight")
    with pytest.raises(poptorch.Error, match=close):
        poptorch.trainingModel(net(), opts)(*batch(2))


class Deep(nn.Module):
    """Has so many small weights that they are updated together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(10)))

    def forward(self, x, y):
        return nn.functional.mse_loss(self.layers(x), y)


MEASURED = {
    "nothing said": lambda w: poptorch.optim.SGD(w, lr=0.1),
    "infinity": lambda w: poptorch.optim.SGD(w, lr=0.1, max_grad_norm=math.inf),
    "loss scaling": lambda w: poptorch.optim.AdamW(w, lr=0.01, loss_scaling=128.0),
    "clipping": lambda w: poptorch.optim.SGD(w, lr=0.1, max_grad_norm=1e-3),
    "LAMB": lambda w: poptorch.optim.LAMB(w, lr=0.01),
    "a traced step": lambda w: torch.optim.Adagrad(w, lr=0.01),
}


@pytest.mark.parametrize("optimizer", MEASURED.values(), ids=MEASURED)
@pytest.mark.parametrize("replicas", [1, 2])
def test_accumulated_gradients_and_their_norm_are_eager_s(optimizer, replicas) -> None:
    model = Deep()
    eager, opts = copy.deepcopy(model), options(accumulation=4, replicas=replicas)
    opts.anchorTensor("norm", "GradientNorm")
    opts.anchorTensor("bias", "AccumulatedGradient___layers.3.bias")
    training = poptorch.trainingModel(model, opts, optimizer(model.parameters()))
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    eager(x, y).backward()

    training(x, y)

    norm = nn.utils.get_total_norm([each.grad for each in eager.parameters()])
    torch.testing.assert_close(training.getAnchoredTensor("norm"), norm)
    torch.testing.assert_close(training.getAnchoredTensor("bias"), eager.layers[3].bias.grad)
    assert {"GradientNorm", "AccumulatedGradient___layers.3.bias"} <= {*training.getTensorNames()}


def test_measuring_the_norm_leaves_the_update_as_it_is() -> None:
    models = [Deep(), Deep()]
    models[1].load_state_dict(models[0].state_dict())
    x, y = torch.randn(16, 4), torch.randn(16, 4)
    for model, anchors in zip(models, [(), ("GradientNorm",)], strict=True):
        opts = options(accumulation=4)
        for name in anchors:
            opts.anchorTensor("norm", name)
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01)
        poptorch.trainingModel(model, opts, optimizer)(x, y)
    torch.testing.assert_close(models[0].state_dict(), models[1].state_dict())


X = torch.arange(4.0).reshape(2, 2)


def of(*args, **kwargs):
    return args, kwargs


class Awkward:
    def __eq__(self, other: object) -> bool:
        raise ValueError("no")

    __hash__ = None


def total(*args, **kwargs):
    return sum(args) + sum(kwargs.values())


POSITIONS = "Number of positional arguments mismatch"
TIMES, THREE, NAN = {"by": 3, "kind": "times"}, torch.full((2, 1), 3.0), float("nan")
CALLS = {  # a function, calls that equal eager's, and others that are refused afterwards
    "any order of keywords and keys": (
        lambda a, b, *, c: a["x"] - 2 * a["y"]["p"] + 4 * a["y"]["q"] + 3 * b + 5 * c,
        [
            of({"x": X, "y": {"p": X + 1, "q": X}}, c=X + 3, b=X + 2),
            of(b=X, c=X + 3, a={"y": {"q": X + 4, "p": X + 1}, "x": X}),
        ],
        {
            r"Keys mismatch for a\n.*Missing arguments: y": of(b=X, c=X, a={"x": X}),
            "Unexpected arguments: z": of(b=X, c=X, a={"x": X, "y": {"p": X, "q": X}, "z": X}),
        },
    ),
    "none": (lambda: torch.ones(2), [of(), of()], {}),
    "variadic": (total, [of(X, X, other=X), of(X, 2 * X, other=X)], {POSITIONS: of(X, other=X)}),
    "called like these": (total, [of(X, args=X, kwargs=X), of(X, args=2 * X, kwargs=X)], {}),
    "another than the default": (
        lambda x, scale=2: x * scale,
        [of(X, scale=3)],
        {r"Value mismatch for scale\n.*expected 3 but got 2": of(X)},
    ),
    "a tensor as a default": (
        lambda x, factor=THREE: x * factor,
        [of(X), of(X, 2 * THREE), of(X)],
        {"Shape mismatch": of(X, X)},
    ),
    "a scalar": (lambda x, s: x * s, [of(X, torch.tensor(2.0)), of(X, torch.tensor(3.0))], {}),
    "constants": (
        lambda x, how: x * how["by"] if how["kind"] == "times" else x,
        [of(X, TIMES)],
        {r"Value mismatch for (?s:.*)expected 3 but got 4": of(X, {**TIMES, "by": 4})},
    ),
    "no number": (lambda x, _: x, [of(X, NAN), of(X, NAN)], {"Type mismatch": of(X, Awkward())}),
}


@pytest.mark.spec("executor", 22, 66)
@pytest.mark.parametrize("name", CALLS)
def test_calls_bind_arguments_as_python_does(name: str) -> None:
    forward, calls, refused = CALLS[name]
    wrapped = poptorch.inferenceModel(forward, options())
    for args, kwargs in calls:
        assert torch.equal(wrapped(*args, **kwargs), forward(*args, **kwargs))
    for said, (args, kwargs) in refused.items():
        with pytest.raises(poptorch.Error, match=said):
            wrapped(*args, **kwargs)


def test_a_tensor_without_dimensions_is_refused_with_what_to_pass_instead() -> None:
    model = inference(lambda x, s: x * s, iterations=2)

    with pytest.raises(AssertionError, match="has no dimensions") as caught:
        model(X, torch.tensor(2.0))

    assert "tensor.item()" in str(caught.value)
    assert "tensor.expand(2)" in str(caught.value)
    assert torch.equal(model(X, 2.0), 2 * X)


@pytest.mark.spec("executor", 15, 16, 17)
def test_every_tensor_is_split_and_scalars_are_not() -> None:
    for other in (torch.tensor(2.0), torch.ones(1, 2)):
        with pytest.raises(AssertionError, match="Invalid batch dimension"):
            inference(lambda x, s: x * s, iterations=2)(X, other)
    with pytest.raises(poptorch.Error, match=r"has 2 rows; .* a multiple of 3"):
        inference(lambda x: x, iterations=3)(X)
    mask = torch.tensor([[1.0, 0.0]])
    got = inference(lambda x, mask: x * mask, iterations=2)(X, mask.expand(2, 2))
    assert torch.equal(got, X * mask)


def test_warnings_come_once(caplog) -> None:
    wrapped = inference(lambda x, d: x + d["y"])
    for strange in (torch.ones(2, 2, requires_grad=True), torch.ones(2, 2).t()):
        for _ in range(2):
            assert not wrapped(strange, {"y": X}).requires_grad
    detached = "has requires_grad=True set. This tensor will be detached because backward pass via"
    for phrase in (f"Input tensor {detached} inputs", "not contiguous", "partially supported"):
        assert caplog.text.count(phrase) == 1


class Pair:
    """A type that only its parser understands."""

    def __init__(self, left, right, note="") -> None:
        self.left, self.right, self.note = left, right, note


class PairParser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):  # noqa: N802
        yield struct.left
        yield struct.right

    def reconstruct(self, original_structure, tensor_iterator):
        return type(original_structure)(*tensor_iterator, original_structure.note)


class Labelled(Pair):
    """Has no parser of its own."""


class Swapping(PairParser):
    def reconstruct(self, original_structure, tensor_iterator):
        right, left = tensor_iterator
        return type(original_structure)(left, right)


@pytest.mark.spec("ops", 28)
def test_a_parser_serves_subclasses_until_it_is_replaced_or_removed() -> None:
    def forward(pairs):
        return [type(p)(p.right, p.left * 2, p.note) for p in pairs]

    poptorch.registerCustomArgParser(Pair, PairParser())
    wrapped = inference(forward)
    (got,) = wrapped([Labelled(X, X + 1, "kept")])
    assert isinstance(got, Labelled)
    assert torch.equal(got.left, X + 1)
    assert torch.equal(got.right, 2 * X)
    assert got.note == "kept"
    wrapped([Labelled(X + 5, X)])  # compared tensor by tensor
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for \*args\[0\]\[0\]\[0\]"):
        wrapped([Labelled(X[:1], X)])
    with pytest.raises(poptorch.Error, match=r"Type mismatch for \*args\[0\]\[0\]\n"):
        wrapped([Pair(X, X)])
    for kind, parser, left in (
        (Labelled, Swapping(), 2 * (X + 1)),  # its own comes first
        (Labelled, None, X + 1),
        (Pair, Swapping(), 2 * (X + 1)),
    ):
        poptorch.registerCustomArgParser(kind, parser)
        assert torch.equal(inference(forward)([Labelled(X, X + 1)])[0].left, left)
    poptorch.registerCustomArgParser(Pair, None)
    with pytest.raises(
        poptorch.Error, match=r"(?s)cannot be found.*registerCustomArgParser\(Label"
    ):
        inference(forward)([Labelled(X, X)])


@pytest.mark.parametrize("parser", [PairParser, object(), lambda value: value])
def test_only_parsers_of_classes_are_registered(parser) -> None:
    with pytest.raises(poptorch.Error, match="must inherit from ICustomArgParser"):
        poptorch.registerCustomArgParser(Pair, parser)
    with pytest.raises(poptorch.Error, match="must be a class"):
        poptorch.registerCustomArgParser(Pair(X, X), PairParser())
    with pytest.raises(TypeError, match="abstract"):
        poptorch.ICustomArgParser()


def test_parsers_of_graph_networks_are_optional(monkeypatch) -> None:
    calls = []
    package = types.SimpleNamespace(registerCustomArgParsers=lambda: calls.append(True))
    for module in (None, package):
        monkeypatch.setitem(sys.modules, "poptorch_geometric", module)
        poptorch.registerGeometricCustomArgParsers()
    assert calls == [True]


@pytest.mark.spec("executor", 50)
@pytest.mark.spec("ops", 23)
def test_forward_is_called_as_the_wrapper_was() -> None:
    seen = []

    def forward(*args, **kwargs):
        seen.append((len(args), sorted(kwargs)))
        assert poptorch.isRunningOnIpu()
        return original(*args, **kwargs)

    def original(a, b=None, c=None, *, d=None):
        return a * (1 if c is None else c)

    forward.__wrapped__ = original  # as functools.wraps says it, and decorators with it
    for args, kwargs in (((), {"a": X, "c": X}), ((X, None, X), {"d": 2})):
        seen.clear()
        wrapped = poptorch.inferenceModel(Calling(forward), unchecked())
        assert torch.equal(wrapped(*args, **kwargs), original(*args, **kwargs))
        assert seen == [(len(args), sorted(kwargs))]
    assert not poptorch.isRunningOnIpu()


@dataclasses.dataclass(frozen=True)
class Both:
    """A frozen dataclass with a constant, a nested one, and what ``__post_init__`` adds."""

    x: torch.Tensor
    rest: dict[str, torch.Tensor]
    scale: float = 2.0
    inner: Both | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.x)


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    made: torch.Tensor = dataclasses.field(init=False)


def test_dataclasses_are_containers() -> None:
    def forward(both):
        result = Slotted(both.x * both.scale + both.rest["y"])
        result.made = both.inner.x - both.double
        return {"result": result, "again": dataclasses.replace(both, x=both.x + 1)}

    model = inference(forward, iterations=2)
    for seed in range(2):
        x, y, z = (normal(2, 3, seed=10 * seed + at) for at in range(3))
        got = model(Both(x, {"y": y}, inner=Both(z, {})))
        assert type(got["result"]) is Slotted
        torch.testing.assert_close([got["result"].x, got["result"].made], [x * 2 + y, z - 2 * x])
        assert type(got["again"]) is Both
        assert got["again"].scale == 2.0
        torch.testing.assert_close([got["again"].x, got["again"].inner.x], [x + 1, z])
    with pytest.raises(poptorch.Error, match=r"(?s)for .*\.scale.*expected 2.0 but got 3.0"):
        model(Both(x, {"y": y}, scale=3.0, inner=Both(z, {})))
    with pytest.raises(poptorch.Error, match=r"Type mismatch for .*\.inner"):
        model(Both(x, {"y": y}))
    data = [Both(normal(2, 3, seed=at), {"y": normal(2, seed=at)}) for at in range(3)]
    joined = combining.join(data)  # as batches
    assert torch.equal(joined.x, torch.cat([each.x for each in data]))
    assert torch.equal(joined.rest["y"], torch.cat([each.rest["y"] for each in data]))


class Holder:
    def __init__(self, x):
        self.inside = {"deep": [x]}


@pytest.mark.parametrize(
    "wrap", [Holder, lambda x: {x}, lambda x: torch.distributions.Normal(x, 1.0)]
)
def test_other_objects_with_tensors_are_refused(wrap) -> None:
    """They would be constants of the program: a second one would be ignored."""
    x = normal(2, 3)
    model = inference(lambda x, other: x)
    with pytest.raises(poptorch.Error, match=r"(?s)is an object whose .*registerCustomArgParser"):
        model(x, wrap(x))
    assert torch.equal(model(x, "no tensors"), x)
    with pytest.raises(poptorch.Error, match=r"(?s)forward returns an object whose.*output\[0\]"):
        inference(lambda x: [wrap(x * 2)])(x)
