"""Operators of public programs, found by name, no library; those by which replicas exchange."""

import pytest
import torch
from torch import nn

import poptorch
from helpers.wrapping import Calling, Having, Scaled, Several, infer, options, training

DOMAIN, GROUPING = "ai.graphcore", "__collectiveReplicaGrouping"
X = torch.tensor([[0.3, -1.7], [2.0, 0.9], [-0.4, 3.1], [1.5, 0.6]])
BLOCKS = {"n_rows": 4, "n_cols": 6, "block_size": 2, "rows": [2, 0, 0], "cols": [4, 0, 2]}
VALUES = [float(v) for v in range(1, 13)]
QUANT = {"exponent_bits": 4, "mantissa_bits": 3, "rounding": "nearest", "fwd": True, "bwd": "ste"}
PRODUCT = {"mode": "sparse_dense", "values": VALUES, **BLOCKS}


def op(name: str, *inputs: torch.Tensor, out: torch.Tensor, **attributes) -> torch.Tensor:
    (result,) = poptorch.custom_op(inputs, name, DOMAIN, 1, [out], attributes)
    return result


def quantised(**attributes):
    return lambda a: op("SimulatedQuant", a, out=a, **QUANT | attributes)


def sparse(mode: str, like):
    return lambda a: op("StaticSparseMatmul", a, out=like(a), **PRODUCT | {"mode": mode})


def update_of(function, x: torch.Tensor, weight: torch.Tensor, opts=None):
    """Output, and the gradient of a weight that multiplies the input."""
    model = Scaled(function, tuple(weight.shape))
    model.weight.data.copy_(weight)
    out, _ = training(model, opts, lr=1.0)(x)
    return out, weight - model.weight.detach()


def eager_update(function, x: torch.Tensor, weight: torch.Tensor):
    weight = weight.clone().requires_grad_()
    out = function(weight * x)
    out.square().mean().backward()
    return out.detach(), weight.grad


def dense_matrix() -> torch.Tensor:
    matrix = torch.zeros(4, 6)
    for at, (row, col) in enumerate(zip(BLOCKS["rows"], BLOCKS["cols"], strict=True)):
        matrix[row : row + 2, col : col + 2] += torch.tensor(VALUES[4 * at : 4 * at + 4]).view(2, 2)
    return matrix


def distances(p: int):
    """The operator that is known, and its formula."""
    return (
        lambda a: op(f"L{p}Distance", a, X[:3], out=torch.zeros(4, 3), root_path="/nowhere"),
        lambda a: (a[:, None] - X[None, :3]).abs().pow(p).sum(-1).pow(1 / p),
    )


CASES = {
    "L1": (*distances(1), X),
    "L2": (*distances(2), X),
    "proxy": (lambda a: op("AutogradProxy", a.exp(), a * 3, out=a),
              lambda a: a.exp().detach() + 3 * a - (3 * a).detach(), X),
    "quantised": (quantised(exponent_bits=5, mantissa_bits=10),
                  lambda a: a + (a.half().float() - a).detach(), X),
    "sparse @ dense": (sparse("sparse_dense", lambda a: a[:4]), lambda a: dense_matrix() @ a,
                       torch.cat([X, X[:2]])),
    "dense @ sparse": (sparse("dense_sparse", lambda a: torch.zeros(2, 6)),
                       lambda a: a @ dense_matrix(), X.t().contiguous()),
}  # fmt: skip


def test_values_and_gradients_are_those_of_the_formula() -> None:
    known, plain, inputs = zip(*CASES.values(), strict=True)
    weights = [torch.linspace(0.5, 1.5, x.shape[1]) for x in inputs]
    model = Several(known, weights)
    outs, _ = training(model, lr=1.0)(*inputs)
    for at, name in enumerate(CASES):
        ours = outs[at], weights[at] - model.weights[at].detach()
        wanted = eager_update(plain[at], inputs[at], weights[at])
        torch.testing.assert_close(ours, wanted, msg=lambda text, name=name: f"{name}: {text}")


def test_gradient_is_zero_at_distance_zero() -> None:
    point, weight = torch.tensor([[1.0, 2.0]]), torch.ones(2)

    def function(a):
        return sum(op(f"L{n}Distance", a, point, out=torch.zeros(1, 1)) for n in (1, 2)) + 1

    out, gradient = update_of(function, point, weight)
    assert out.item() == 1.0
    assert gradient.tolist() == [0.0, 0.0]


def grid(exponent_bits: int, mantissa_bits: int) -> torch.Tensor:
    """Every number that is not negative of a format, from its definition."""
    bias, fractions = 2 ** (exponent_bits - 1) - 1, torch.arange(2.0**mantissa_bits)
    fractions = fractions / 2**mantissa_bits
    normal = [(1 + fractions) * 2.0 ** (code - bias) for code in range(1, 2**exponent_bits - 1)]
    return torch.cat([fractions * 2.0 ** (1 - bias), *normal])


@pytest.mark.parametrize("bits", [(4, 3), (2, 1), (3, 0)])
def test_quantised_values_are_the_nearest_of_the_format(bits: tuple[int, int]) -> None:
    numbers = grid(*bits)
    largest = numbers[-1]
    x = torch.randn(500, generator=torch.Generator().manual_seed(1)) * largest / 2
    x = torch.cat([x, x * 2**-8, numbers, -numbers, torch.tensor([torch.inf, -torch.inf])])
    found = infer(quantised(exponent_bits=bits[0], mantissa_bits=bits[1]), x)
    expected = numbers[(x.abs().clamp(max=largest)[:, None] - numbers).abs().argmin(1)]
    torch.testing.assert_close(found.abs(), expected, rtol=0, atol=0)
    assert torch.equal(found.sign(), torch.where(expected == 0, 0, x.sign()))
    assert infer(quantised(), x.half()).dtype == torch.float16


def test_stochastic_rounding_is_right_on_average() -> None:
    x = torch.full((4000,), 1.0 + 0.125 * 0.25)
    found = infer(quantised(rounding="stochastic"), x)
    assert set(found.tolist()) == {1.0, 1.125}
    assert abs(found.mean() - x[0]) < 0.01


@pytest.mark.parametrize("fwd, bwd", [(True, "quantise"), (False, "ste"), (True, "stop")])
def test_gradients_are_quantised_passed_on_or_stopped(fwd: bool, bwd: str) -> None:
    numbers = grid(4, 3)

    def rounded(x):
        return numbers[(x.abs()[:, None] - numbers).abs().argmin(1)] * x.sign()

    x, weight = X[0], torch.tensor([0.7, 1.3])
    found, gradient = update_of(lambda a: quantised(fwd=fwd, bwd=bwd)(a) + 0 * a, x, weight)
    value = weight * x
    out = rounded(value) if fwd else value
    passed = {"quantise": rounded(out), "ste": out, "stop": torch.zeros(2)}[bwd]
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(gradient, passed * x)


@pytest.mark.parametrize(
    "name, shapes, attributes, title",
    [
        ("AutogradProxy", [(2,), (3,)], {}, "cannot take its inputs"),
        ("L1Distance", [(2, 3), (2, 4)], {}, "cannot take its inputs"),
        ("L1Distance", [(2, 3), (2, 3)], {}, "something else than its example outputs"),
        ("L2Distance", [(2,), (2, 4)], {}, "cannot take its inputs"),
        ("SimulatedQuant", [(2,)], QUANT | {"exponent_bits": 6}, "attribute 'exponent_bits'"),
        ("SimulatedQuant", [(2,)], QUANT | {"rounding": "up"}, "attribute 'rounding'"),
        ("StaticSparseMatmul", [(4, 2)], PRODUCT, "cannot take its inputs"),
        ("ReplicatedAllToAll", [()], {}, "cannot take its inputs"),
        ("StaticSparseMatmul", [(2, 2)], {"mode": "dense"}, "attribute 'mode'"),
        ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"values": VALUES[1:]}, "attribute 'values'"),
        ("StaticSparseMatmul", [(6, 2)], PRODUCT | {"rows": [2, 1, 0]}, "attribute 'rows'"),
        ("ReplicatedAllReduceTP", [(2,)], {"op": "mean"}, "attribute 'op'"),
        ("ReplicatedAllReduceTP", [(2,)], {GROUPING: [2, 1, 2]}, GROUPING),
        ("ReplicatedAllGather", [(2,)], {}, "cannot return its example outputs"),
    ],
)
def test_what_does_not_fit_is_an_error(name, shapes, attributes, title) -> None:
    inputs = [torch.ones(shape) for shape in shapes]
    with pytest.raises(poptorch.Error, match=title) as caught:
        infer(lambda *a: op(name, *a, out=torch.zeros(7), **attributes), *inputs)
    assert "test_known.py" in str(caught.value)
    with pytest.raises(poptorch.Error, match="registered in version 1"):
        infer(lambda *a: poptorch.custom_op(a, name, DOMAIN, 2, [X])[0], *inputs)


def test_an_operator_of_the_user_comes_first(monkeypatch) -> None:
    from poptorch.ops import custom

    monkeypatch.setattr(custom, "_registered", {**custom._registered})
    poptorch.register_custom_op("L2Distance", DOMAIN, 1, lambda i, _: [i[0] + i[1]])
    assert torch.equal(infer(lambda a: op("L2Distance", a, a, out=a), X), X + X)


REPLICAS, ROWS = 4, 8
WEIGHT = torch.tensor([0.5, 1.0, 1.5])


def batch(steps: int = 1) -> torch.Tensor:
    return torch.randn(steps * REPLICAS * ROWS, 3, generator=torch.Generator().manual_seed(steps))


def gather(a):
    return op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS, *a.shape, dtype=a.dtype))


def reduce(**attributes):
    return lambda a: op("ReplicatedAllReduceTP", a, out=a, op="sum", **attributes)


def to_all(a):
    return op("ReplicatedAllToAll", a, out=a)


def eager_gather(tensors):
    """Each replica differentiates its own result for its own tensor."""
    parts = range(len(tensors))
    return [
        torch.stack([tensors[j] if i == j else tensors[j].detach() for j in parts]) for i in parts
    ]


def eager_reduce(*groups):
    def function(tensors):
        results = []
        for i, own in enumerate(tensors):
            (group,) = (g for g in groups if i in g)
            results.append(own + sum(tensors[j].detach() for j in group if j != i))
        return results

    return function


def eager_to_all(tensors):
    size = len(tensors[0]) // len(tensors)
    return [torch.cat([t[i * size : (i + 1) * size] for t in tensors]) for i in range(len(tensors))]


EXCHANGES = {
    "gather": (gather, eager_gather),
    "reduce": (reduce(), eager_reduce([0, 1, 2, 3])),
    "neighbours": (reduce(**{GROUPING: [2, 1, 4]}, backwards=False), eager_reduce([0, 1], [2, 3])),
    "strided": (reduce(**{GROUPING: [2, 2, 4]}), eager_reduce([0, 2], [1, 3])),
    "to all": (to_all, eager_to_all),
}


@pytest.mark.parametrize("name", EXCHANGES)
def test_inference(name: str) -> None:
    known, eager = EXCHANGES[name]
    integers = torch.arange(3 * REPLICAS * ROWS * 3, dtype=torch.int32).view(-1, 3)
    for x in (batch(steps=3), integers):
        opts, steps = options(replicas=REPLICAS, iterations=3), x.view(3, REPLICAS, ROWS, 3)
        expected = torch.cat([result for step in steps for result in eager(list(step))])
        model = poptorch.inferenceModel(Calling(known), opts)
        torch.testing.assert_close(model(x), expected)
        assert model.plan().staged is None
        assert f"{3 * REPLICAS} lanes" in str(model.plan())


def trained(function, x: torch.Tensor, opts: poptorch.Options) -> torch.Tensor:
    """Return the gradient of a weight that multiplies the input of a function."""
    return update_of(lambda a: function(a).sin(), x, WEIGHT, opts)[1]


def expected_gradient(eager, x: torch.Tensor, replicas: int = REPLICAS) -> torch.Tensor:
    copy = WEIGHT.clone().requires_grad_()
    steps = [eager(list(copy * step)) for step in x.view(-1, replicas, ROWS, 3)]
    losses = [result.sin().square().mean() for results in steps for result in results]
    torch.stack(losses).mean().backward()
    return copy.grad


@pytest.mark.parametrize("name, lanes", [*((name, 0) for name in EXCHANGES), ("strided", 1)])
def test_gradients(name: str, lanes: int) -> None:
    (known, eager), x = EXCHANGES[name], batch(steps=2)
    opts = options(replicas=REPLICAS, accumulation=2).lanes(lanes)
    torch.testing.assert_close(trained(known, x, opts), expected_gradient(eager, x))


def test_a_sum_in_backward_leaves_values_alone() -> None:
    x, function = batch(), reduce(backwards=True)
    torch.testing.assert_close(infer(function, x, opts=options(replicas=REPLICAS)), x)
    copy = WEIGHT.clone().requires_grad_()
    tensors = list(copy * x.view(REPLICAS, ROWS, 3))
    loss = sum(tensor.sin().square().mean() for tensor in tensors)
    gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
    torch.autograd.backward(tensors, [sum(gradients) / REPLICAS] * REPLICAS)
    torch.testing.assert_close(trained(function, x, options(replicas=REPLICAS)), copy.grad)


def test_results_of_other_kinds() -> None:
    def forward(a):
        flat = op("ReplicatedAllGather", a, out=torch.zeros(REPLICAS * a.numel()))
        return a + reduce()(torch.ones(3)), flat  # the first: the same everywhere

    shifted, flat = infer(forward, batch(), opts=options(replicas=REPLICAS).laneMemory(1))
    torch.testing.assert_close(shifted, batch() + REPLICAS)
    assert torch.equal(flat, batch().flatten().repeat(REPLICAS))


def test_of_one_replica_they_are_the_identity() -> None:
    def function(a):
        return reduce(**{GROUPING: [1, 1, 1]})(to_all(op("ReplicatedAllGather", a, out=a[None])[0]))

    x = batch()
    assert torch.equal(infer(function, x, opts=options(iterations=2)), x)
    assert torch.equal(function(x), x)
    wanted = expected_gradient(lambda tensors: tensors, x, replicas=1)
    torch.testing.assert_close(trained(function, x, options(accumulation=4)), wanted)


def pipelined(a):
    with poptorch.Block("a", ipu_id=0):
        a = a + 1
    with poptorch.Block("b", ipu_id=1):
        return reduce()(a)


@pytest.mark.parametrize("function, backend, title, reason", [
    (lambda a: poptorch.cond(a.sum() > 0, lambda b: [reduce()(b)], [a], lambda b: [b], [a])[0],
     "reference", "needs all replicas side by side", "branches"),
    (lambda a: torch.func.vmap(reduce())(a), "reference", "only if they all run side by side",
     "torch.func"),
    (pipelined, "staged", "needs all replicas side by side", "blocks on chips"),
])  # fmt: skip
def test_replicas_apart_cannot_exchange(function, backend, title: str, reason: str) -> None:
    opts = options(backend, replicas=REPLICAS, iterations=2)
    with pytest.raises(poptorch.Error, match=title) as caught:
        infer(function, batch(), opts=opts)
    assert caught.match(reason)
    assert "test_known.py" in str(caught.value)


def sharded(model, x):
    """As D. Cattaneo et al., "BESS: Balanced entity sampling and sharing", train embeddings."""
    y = to_all(x * model.own) * model.common
    return y, poptorch.identity_loss(y.sin(), "mean")


def test_weights_per_replica_and_an_exchange() -> None:
    initial, x = (torch.rand(REPLICAS, 3), WEIGHT.clone()), batch(steps=2)
    model = Having(sharded, own=nn.Parameter(initial[0]), common=nn.Parameter(initial[1]))
    own, common = leaves = [value.clone().requires_grad_() for value in initial]
    opts = options(replicas=REPLICAS, accumulation=2).outputMode(poptorch.OutputMode.All)
    for short, name in (("own", "Gradient___own"), ("w", "common")):
        opts.anchorTensor(short, name)
    executor, one = training(model, opts), poptorch.VariableRetrievalMode.OnePerGroup
    executor.own.replicaGrouping(poptorch.CommGroupType.NoGrouping, 0, one)
    out, loss = executor(x)
    steps = x.view(2, REPLICAS, ROWS, 3) * own[:, None]
    wanted = [part * common for step in steps for part in eager_to_all(list(step))]
    losses = torch.stack([part.sin().mean() for part in wanted])
    losses.mean().backward()
    torch.testing.assert_close(out, torch.cat(wanted))
    torch.testing.assert_close(loss, losses)
    parts = executor.getAnchoredTensor("own").view(2, REPLICAS, REPLICAS, 3)
    torch.testing.assert_close(parts.mean((0, 1)), own.grad)
    copies = executor.getAnchoredTensor("w").view(-1, 3)
    torch.testing.assert_close(copies, WEIGHT.expand_as(copies))
    for ours, theirs in zip((model.own, model.common), leaves, strict=True):
        torch.testing.assert_close(ours.detach(), theirs.detach() - 0.1 * theirs.grad)


GATHERED = (4, 2, 3)


def gathered(x):
    example = torch.zeros(GATHERED)
    return poptorch.custom_op([x], "ReplicatedAllGather", "ai.graphcore", 1, [example])[0].sum(0)


def from_outside(model, x, index):
    body = lambda a: gathered(a) + model.table[model.rows]  # noqa: E731
    return poptorch.for_loop(2, body, [x])[0]


def from_the_loop(model, x, index):
    return poptorch.for_loop(2, lambda a: gathered(a) + a[:, index[:1]], [x])[0]


def at_places_of_the_loop(model, x, index):
    def body(a, place):
        window = poptorch.dynamic_slice(model.table, 0, place, 2, 1)
        return gathered(a) + window, place + 1

    return poptorch.for_loop(2, body, [x, torch.zeros((), dtype=torch.int32)])[0]


@pytest.mark.parametrize(
    "function, expected",
    [
        (from_outside, lambda table, a, each: each + table[[1, 0]]),
        (from_the_loop, lambda table, a, each: each + a[:, :, [1]]),
    ],
)
def test_lookups_beside_a_collective_in_a_loop_run_side_by_side(function, expected) -> None:
    torch.manual_seed(0)
    table, x = torch.randn(5, 3), torch.randn(8, 3)
    model = Having(function, table=table, rows=torch.tensor([1, 0]))
    executor = poptorch.inferenceModel(model, options(replicas=4))

    got = executor(x, torch.tensor([1, 0] * 4))

    value = x.reshape(GATHERED)
    for _ in range(2):
        value = expected(table, value, value.sum(0)).expand(GATHERED)
    torch.testing.assert_close(got, value.reshape(8, 3))


def test_windows_beside_a_collective_in_a_loop_run_side_by_side() -> None:
    torch.manual_seed(0)
    table, x = torch.randn(5, 3), torch.randn(8, 3)
    model = Having(at_places_of_the_loop, table=table)
    executor = poptorch.inferenceModel(model, options(replicas=4))

    got = executor(x, torch.tensor([1, 0] * 4))

    value = x.reshape(GATHERED)
    for place in range(2):
        value = (value.sum(0) + table[place : place + 2]).expand(GATHERED)
    torch.testing.assert_close(got, value.reshape(8, 3))


def test_all_to_all_is_found_by_its_short_name() -> None:
    def forward(x):
        return poptorch.custom_op([x], "AllToAll", "ai.graphcore", 1, [x])[0]

    executor = poptorch.inferenceModel(Calling(forward), options(replicas=2))

    assert executor(torch.arange(8.0)).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
