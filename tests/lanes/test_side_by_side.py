"""The graph of several micro-batches against that of one, and both against eager torch."""

import copy
import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import poptorch
from harden import parts
from helpers.beside import OPTIMIZERS, Eager, Way, wrapped
from helpers.cases import long
from helpers.closeness import near
from helpers.wrapping import Having, options
from helpers.zoo import ROWS, ZOO
from poptorch import _capture, _lanes
from poptorch._compile import lanes as choosing
from poptorch._ir.loops import Lanes

STEPS, WIDTH = 4, 6


def norm(**settings) -> nn.Module:
    return nn.BatchNorm1d(WIDTH, **settings)


class Renorm(nn.BatchNorm1d):
    """S. Ioffe, "Batch Renormalization": what was seen so far corrects this batch."""

    def forward(self, x):
        mean, std = x.mean(0), x.var(0, unbiased=False).add(self.eps).sqrt()
        before = self.running_var.add(self.eps).sqrt()
        r = (std / before).detach().clamp(0.5, 2)
        d = ((mean - self.running_mean) / before).detach().clamp(-1, 1)
        out = (x - mean) / std * r + d
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(std.square(), self.momentum)
        return out * self.weight + self.bias


def counted(m, x):
    m.count += 1
    return x * m.count


def averaged(m, x):
    m.count += 1
    m.mean += (x.detach().mean(0) - m.mean) / m.count
    return x


def in_a_row(m, x):
    m.mean.lerp_(x.detach().mean(0), 0.5)
    m.slow.mul_(0.75).add_(m.mean)
    return x * m.slow.clone()


def held(m, x):
    out = x + m.mean.clone()
    m.mean.copy_(x.detach().mean(0))
    return out


def squashed(m, x):
    m.mean.copy_(torch.tanh(m.mean + x.detach().mean(0)))
    return x


def crossed(m, x):
    before = m.mean.clone()
    m.mean.add_(m.slow * 0.1)
    m.slow.add_(before)
    return x * m.slow.clone()


def hooked(m, x):
    """Hooks of all kinds that change gradients, or what Python sees."""
    assert m.layer.weight.requires_grad
    assert x.requires_grad == torch.is_grad_enabled()
    y = m.norm(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
    return y.sin()


def with_hooks() -> nn.Module:
    layer = nn.LayerNorm(WIDTH)
    layer.register_full_backward_hook(lambda m, given, made: (given[0] * 0.5,))
    layer.register_full_backward_pre_hook(lambda m, made: (made[0].flip(0) * 3,))
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    layer.register_forward_hook(lambda m, args, out: out + args[0])
    layer.weight.register_hook(lambda gradient: gradient.flip(0))
    layer.weight.register_hook(lambda gradient: None)
    layer.bias.register_hook(lambda gradient: gradient.clamp_(-0.05, 0.05) + 1)
    return layer


def rebound(m, x):
    m.count = m.count + 1
    m.mean = m.mean * 0.5 + x.detach().mean(0)
    return x - m.mean


def replaced(m, x):
    if not isinstance(m.norm, nn.Tanh):
        m.norm = nn.Tanh()
    return m.norm(x)


def looked_up(m, x):
    rows = (x.detach().abs() * 2).long() % WIDTH
    bags = nn.functional.embedding_bag(rows, m.layer.weight, mode="mean", sparse=True)
    return x + bags + nn.functional.embedding(rows[:, 0], m.layer.weight, sparse=True)


def placed(m, x):
    device, other = ("ipu", "ipu:0") if poptorch.isRunningOnIpu() else ("cpu", "cpu")
    other = torch.device(other)
    with torch.device(device):
        x = x.to(device) * (torch.arange(WIDTH) < 4)
    made = torch.ones(WIDTH, device=device) + x.new_zeros(WIDTH, device=other)
    made = made.to(other, torch.float32) + torch.zeros_like(x, device=other)
    mask = torch.zeros(x.shape[0], WIDTH, device=device)
    mask[:, 1] = 1
    picked = x[:, mask[0].nonzero().squeeze(1)] * x[mask.nonzero(as_tuple=True)][:, None]
    return x * made.to(x.device) + picked


# By name: what forward does after a linear layer, another one, and what keeps lanes apart.
CASES = {
    "once": (lambda m, x: m.norm(x), norm, ""),
    "two parts": (lambda m, x: torch.cat([m.norm(part) for part in x.chunk(2)]), norm, ""),
    "called directly": (lambda m, x: m.norm.forward(x), norm, ""),
    "other momentum": (parts.other_momentum, norm, ""),
    "momentum 0": (lambda m, x: m.norm(x), lambda: norm(momentum=0.0), ""),
    "momentum 1": (lambda m, x: m.norm(x), lambda: norm(momentum=1.0), ""),
    "all batches": (lambda m, x: m.norm(x), lambda: norm(momentum=None), ""),
    "eval inside": (parts.evaluated, norm, ""),
    "untracked inside": (parts.untracked, norm, ""),
    "untracked, all batches": (parts.untracked, lambda: norm(momentum=None, affine=False), ""),
    "read in the loss": (lambda m, x: m.norm(x) * m.norm.running_mean.clone(), norm, ""),
    "renorm": (lambda m, x: m.norm(x), lambda: Renorm(WIDTH), ""),
    "read before": (lambda m, x: m.norm(x + m.norm.running_mean.clone()), norm, "running_mean"),
    "counted": (counted, None, ""),
    "averaged": (averaged, None, ""),
    "smoothed": (parts.smoothed, None, ""),
    "in a row": (in_a_row, None, ""),
    "held": (held, None, ""),
    "squashed": (squashed, None, "aten.tanh.default: buffer mean is no longer a multiple"),
    "crossed": (crossed, None, "depends on its previous value"),
    "hooked": (hooked, with_hooks, ""),
    "in one memory": (lambda m, x: m.norm(x.tanh()), lambda: nn.Linear(WIDTH, WIDTH), ""),
    "in eval mode": (lambda m, x: m.norm(x), norm, ""),
    "rebound": (rebound, None, ""),
    "replaced": (replaced, None, ""),
    "looked up": (looked_up, None, "aten._embedding_bag.default"),
    "placed": (placed, None, ""),
    "several results": (lambda m, x: x + sum(x.detach().frexp()), None, ""),
    "turned number": (lambda m, x: x * x.sum().transpose(0, -1), None, ""),
    "solved": (lambda m, x: torch.linalg.solve(x.T @ x + torch.eye(WIDTH), x.T).T, None, ""),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    function, layer, _ = CASES[name]

    def forward(m, x):
        out = function(m, m.layer(x))
        return out, poptorch.identity_loss(out.square(), "mean") if m.training else out.mean()

    model = Having(forward, layer=nn.Linear(WIDTH, WIDTH), norm=layer() if layer else None)
    for buffer in ("mean", "slow") if layer is None else ():
        model.register_buffer(buffer, torch.rand(WIDTH))
    model.register_buffer("count", torch.zeros((), dtype=torch.int64))
    model.share = 0.4  # of the other momentum
    if name == "in one memory":
        model.norm.weight.data = model.layer.weight.data
    return model


TRAINED = Way(accumulation=STEPS, replicas=2, optimizer="momentum")
INFERRED = Way(training=False, iterations=STEPS, replicas=2)
CLASSES = [(name, way) for name in CASES for way in (TRAINED, INFERRED)]
IN_DOUBLE = replace(TRAINED, dtype=torch.float64, strategy="Running")
DOUBLE = [("two parts", IN_DOUBLE)]
DOUBLE += [("all batches", replace(IN_DOUBLE, optimizer=each)) for each in OPTIMIZERS]


@pytest.mark.parametrize("backend", ["reference", long("inductor")])
@pytest.mark.parametrize(
    "name, way",
    [*CLASSES, *DOUBLE, ("placed", Way())],
    ids=lambda each: each if isinstance(each, str) else ("inference", "training")[each.training],
)
def test_whatever_it_does_a_model_computes_what_eager_torch_does(name, way, backend, caplog):
    way, reason = replace(way, backend=backend), CASES[name][2]
    caplog.set_level("DEBUG", logger="poptorch:cpp")
    torch.set_default_dtype(way.dtype)
    make = functools.partial(model_of, name)
    eager = Eager(make, lambda results: results[1], way)
    close = near(300, 2, size=4, dtype=way.dtype)
    with wrapped(make, way) as ours:
        if name == "in eval mode":
            for model in (ours.model, *eager.models):
                model.eval().training = way.training  # that of the outermost is the wrapper's
        for batch in torch.randn(2, way.rows, WIDTH):
            torch.testing.assert_close(ours(batch), eager(batch), **close)
        torch.testing.assert_close(ours.state(), eager.state(), **close)
        assert (ours.wrapper.plan().program.lanes is None) == (
            way.rows == Way().rows or bool(reason)
        )
        assert not any("forward" in vars(layer) for layer in ours.model.modules())
    assert reason in caplog.text


def captured(model: nn.Module, *inputs) -> _capture.Micro:
    kept, usual = [], choosing.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choosing, "choose", lambda *args: kept.append(args[0]) or usual(*args))
        poptorch.trainingModel(model, options(accumulation=STEPS)).compile(*inputs)
    return kept[0]


@pytest.mark.parametrize("lanes", [Lanes(3), Lanes(2, 2)], ids=str)
@pytest.mark.parametrize("name", [*ZOO, "renorm", "averaged"])
def test_graphs_of_lanes_compute_what_that_of_one_does(name: str, lanes: Lanes) -> None:
    torch.manual_seed(0)
    if name in ZOO:
        micro = captured(ZOO[name].build(), *ZOO[name].inputs(ROWS * STEPS))
    else:
        micro = captured(model_of(name), torch.randn(STEPS * 8, WIDTH))
    several = _lanes.side_by_side(micro.graph, lanes)
    assert not _lanes.differences(micro.graph, several, lanes, micro.constants)


def differences_with_opposite(micro: _capture.Micro, target: object) -> str:
    """Let the first such operator of two lanes return the opposite; say what is found."""
    several = _lanes.side_by_side(micro.graph, Lanes(2)).copy()
    graph = several.module.graph
    node, *_ = graph.find_nodes(op="call_function", target=target)
    with graph.inserting_after(node):
        wrong = graph.call_function(torch.ops.aten.neg.default, (node,))
    node.replace_all_uses_with(wrong, lambda user: user is not wrong)
    several.module.recompile()
    return " ".join(map(str, _lanes.differences(micro.graph, several, Lanes(2), micro.constants)))


def test_differences_and_wrong_indices_are_found() -> None:
    """Numbers without a fraction may differ only where rounding decides which one it is."""

    def forward(m, x):
        out = m.layer(x) + torch.arange(3) * 9.0
        return out.argmax(1), poptorch.identity_loss(out.square().mean(), "none")

    micro = captured(Having(forward, layer=nn.Linear(4, 3)), torch.randn(8, 4))
    assert "output" in differences_with_opposite(micro, torch.ops.aten.argmax.default)
    assert "gradient.layer.weight" in differences_with_opposite(micro, torch.ops.aten.mm.default)


def test_gradients_of_weights_are_one_product_over_all_rows() -> None:
    """A product or convolution of one micro-batch is one of all, and sums stay as many."""

    def forward(m, x):
        x = m.norm(m.conv(x)).relu().flatten(1)
        out = m.head(nn.functional.layer_norm(m.body(x), (8,), m.w, m.b))
        return poptorch.identity_loss(out.square().mean(), "none")

    layers = {
        "conv": nn.Conv2d(2, 4, 3),
        "norm": nn.GroupNorm(2, 4),
        "body": nn.Linear(64, 8),
        "head": nn.Linear(8, 3),
        "w": nn.Parameter(torch.ones(8)),
        "b": nn.Parameter(torch.ones(8)),
    }
    micro = captured(Having(forward, **layers), torch.randn(8, 2, 6, 6))
    targets = [str(n.target) for n in _lanes.side_by_side(micro.graph, Lanes(4)).operators]
    before = [str(node.target) for node in micro.graph.operators]
    for kind in ("convolution_backward", "layer_norm_backward", "group_norm_backward"):
        assert sum(kind in each for each in targets) == sum(kind in each for each in before) == 1
    products = [sum("mm" in each for each in graph) for graph in (targets, before)]
    assert products[0] == products[1]
    assert not any("bmm" in each for each in targets)
    assert sum("sum" in each for each in targets) == sum("sum" in each for each in before)


def two_layers(change) -> nn.Module:
    def forward(m, x):
        return x, poptorch.identity_loss(m.second(m.first(x).tanh()).square().mean())

    torch.manual_seed(0)
    first, second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = Having(forward, first=first, second=second, kept=torch.ones(WIDTH))
    change(model, model.first.weight.data)
    return model


def in_one_memory(m, weight):
    m.second.weight.data = weight


def test_weights_in_the_same_memory_are_read_from_there() -> None:
    model = two_layers(in_one_memory)
    training, x = poptorch.trainingModel(model, options()), torch.randn(8, WIDTH)
    training(x)
    assert torch.equal(model.second.weight, model.first.weight)
    model.second.weight.detach().mul_(0.5)
    training.copyWeightsToDevice()
    expected = copy.deepcopy(model)(x)[1].detach()
    torch.testing.assert_close(training(x)[1], expected)


OVERLAPPING = {
    "a part": lambda m, weight: setattr(m.second.bias, "data", weight[0]),
    "transposed": lambda m, weight: setattr(m.second.weight, "data", weight.t()),
    "a buffer": lambda m, weight: setattr(m, "kept", weight[1]),
    "frozen": lambda m, weight: (in_one_memory(m, weight), m.second.weight.requires_grad_(False)),
}


@pytest.mark.parametrize("change", OVERLAPPING.values(), ids=OVERLAPPING)
def test_what_would_not_follow_a_trained_weight_in_its_memory_is_refused(change) -> None:
    with pytest.raises(poptorch.Error, match="shares memory with another tensor"):
        poptorch.trainingModel(two_layers(change), options())(torch.randn(8, WIDTH))


def test_stages_and_parts_of_one_memory() -> None:
    x = torch.randn(8, WIDTH)
    alone, staged, apart = (two_layers(in_one_memory) for _ in range(3))
    poptorch.trainingModel(alone, options())(x)
    poptorch.trainingModel(staged, options("staged"))(x)
    torch.testing.assert_close(staged.state_dict(), alone.state_dict())
    apart.first = poptorch.BeginBlock(apart.first, ipu_id=0)
    apart.second = poptorch.BeginBlock(apart.second, ipu_id=1)
    opts = options("staged").setExecutionStrategy(poptorch.ShardedExecution())
    with pytest.raises(poptorch.Error, match="cannot be trained on several chips"):
        poptorch.trainingModel(apart, opts)(x)

    def columns(m, weight):
        """Side by side in one memory, none in that of the other."""
        both = torch.randn(WIDTH, 2 * WIDTH)
        m.first.weight.data, m.second.weight.data = both[:, :WIDTH], both[:, WIDTH:]

    poptorch.trainingModel(two_layers(columns), options())(torch.randn(8, WIDTH))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool])
def test_sums_of_small_integers_do_not_overflow(dtype: torch.dtype) -> None:
    x = torch.full((STEPS * 2, 3), 100).to(dtype)
    opts = options(iterations=STEPS).outputMode(poptorch.OutputMode.Sum)
    summed = poptorch.inferenceModel(Having(lambda m, x: x.clone()), opts)(x)
    assert torch.equal(summed, x.view(STEPS, 2, 3).sum(0, dtype=torch.int32))


def test_loops_around_exchanges_of_replicas() -> None:
    def forward(m, x):
        def step(total):
            known = "ReplicatedAllReduceTP", "ai.graphcore", 1
            (shared,) = poptorch.custom_op([total], *known, [total], {"op": "sum"})
            return [shared * 0.5 + x]

        return poptorch.for_loop(3, step, [x])[0]

    x = torch.randn(2 * 2 * 4, WIDTH)
    result = poptorch.inferenceModel(Having(forward), options(replicas=2, iterations=2))(x)
    rows = x.view(2, 2, 4, WIDTH)
    total = rows
    for _ in range(3):
        total = total.sum(1, keepdim=True) * 0.5 + rows
    torch.testing.assert_close(result, total.reshape(-1, WIDTH))


@pytest.mark.parametrize("rows, accumulation, replicas, width, settings, steps", [
    # About 64 rows, a divisor of the micro-batches; more where the caches hold them: 4 MiB.
    (64, 12, 1, 4096, {}, 0), (64, 12, 2, 4096, {}, 1), (65, 12, 1, 8192, {}, 0),
    (32, 12, 1, 8192, {}, 2), (16, 12, 1, 8192, {}, 4), (8, 12, 2, 8192, {}, 4),
    (64, 12, 1, 512, {}, 6), (64, 12, 1, 64, {}, 12), (2, 128, 1, 4, {}, 64),
    (2, 12, 1, 256, {"laneMemory": 8_000}, 0), (2, 12, 1, 256, {"laneMemory": 20_000}, 2),
    (2, 12, 1, 256, {"laneMemory": 60_000}, 6), (64, 12, 1, 512, {"laneMemory": 1 << 20}, 0),
    (64, 12, 1, 512, {"laneMemory": 8 << 20}, 6), (2, 12, 2, 256, {"lanes": 6}, 3),
    (2, 12, 2, 256, {"lanes": 1}, 0), (2, 12, 1, 256, {"lanes": 5, "laneMemory": 1}, 4),
])  # fmt: skip
def test_so_many_run_side_by_side(rows, accumulation, replicas, width, settings, steps) -> None:
    def forward(m, x):
        return poptorch.identity_loss((x * m.weight).tanh().exp().square().mean(), "none")

    opts = options(accumulation=accumulation, replicas=replicas)
    for name, value in settings.items():
        getattr(opts, name)(value)
    executor = poptorch.trainingModel(Having(forward, weight=nn.Parameter(torch.ones(width))), opts)
    executor.compile(torch.zeros(rows * accumulation * replicas, width))
    assert executor.plan().program.lanes == (Lanes(steps, replicas) if steps else None)


@pytest.mark.parametrize(
    "free, budget",
    [
        (16 << 30, 1 << 30),
        (4 << 30, 1 << 30),
        ((4 << 30) - 1, 1 << 29),
        (12, 2),
        (7, 1),
        (0, 1),
    ],
)
def test_lanes_get_a_quarter_of_the_free_memory_in_halves(free, budget, monkeypatch) -> None:
    monkeypatch.setattr(choosing, "available_memory", lambda: free)
    assert choosing.default_budget() == budget
