"""What lowering gives: slots, purity, traces of few operations, flat bundles."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import poptorch.optim
from helpers.updating import Training, Workload
from poptorch._ir import slots
from poptorch._ir.slots import Kind
from poptorch._update import flatten, lower
from poptorch._update.formulas import ALGORITHMS
from poptorch.optim import KINDS

NAMES = ["SGD", "Adam", "AdamW", "RMSprop", "LAMB"]
ELEMENTWISE = NAMES[:-1]


def training(name, **settings):
    work = Workload("perceptron")
    parameters = work.single()
    if name == "SGD":
        settings = {"momentum": 0.9, "dampening": 0.1, **settings}
    optimizer = getattr(poptorch.optim, name)(parameters.values(), lr=0.01, **settings)
    return Training(optimizer, parameters), work


def traced(piece):
    """The piece as a graph over its input slots in order."""

    def function(*tensors):
        keys = (slot.key for slot in piece.inputs)
        results = piece.function(dict(zip(keys, tensors, strict=True)))
        return [results[slot.key] for slot in piece.outputs]

    fakes = [torch.zeros(slot.shape, dtype=slot.dtype) for slot in piece.inputs]
    return make_fx(function, tracing_mode="fake")(*fakes)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("clip", [float("inf"), 0.1])
def test_traces_are_pure_and_equal_eager(name, clip):
    if clip < 1 and name in ("RMSprop", "LAMB"):
        pytest.skip("takes no max_grad_norm")
    ours, work = training(name, **({"max_grad_norm": clip} if clip < 1 else {}))
    graph = traced(ours.piece)
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert not [t for t in targets if t._schema.is_mutable]
    assert torch.ops.aten._local_scalar_dense.default not in targets
    given = ours.tensors | {f"gradient.{n}": g.float() for n, g in work.gradients().items()}
    outputs = graph(*(given[slot.key] for slot in ours.piece.inputs))
    ours.step({n: g.float() for n, g in work.gradients().items()})
    for slot, value in zip(ours.piece.outputs, outputs, strict=True):
        torch.testing.assert_close(value, ours.tensors[slot.key])


def test_hyper_parameters_are_single_precision_scalars():
    ours, _ = training("Adam", betas=(0.9, 0.99))
    hypers = [slot for slot in ours.piece.inputs if slot.kind is Kind.HYPER]
    assert [slot.path for slot in hypers] == ["0.lr", "0.one_minus_beta1", "0.one_minus_beta2"]
    assert {(slot.shape, slot.dtype) for slot in hypers} == {((), torch.float32)}


def test_weights_that_the_program_lacks_are_skipped():
    ours, _ = training("Adam")
    params = [slots.param("0.bias", (16,), torch.float32)]
    piece = lower(ours.spec, params)
    assert {slot.path for slot in piece.outputs} == {
        "step", "0.bias", "first.0.bias", "second.0.bias",
    }  # fmt: skip


def flat(tensors, bundle, slot):
    """That tensor of the members of a bundle, behind one another."""
    result = torch.zeros(bundle.slot.shape)
    for member in bundle.members:
        value = tensors[slot.of(member.slot).key]
        result[member.offset :][: member.slot.numel] = value.reshape(-1)
    return result


@pytest.mark.parametrize("name", ELEMENTWISE)  # LAMB's norms are of single weights
def test_flat_bundles_give_the_same_update_in_a_few_operations(name):
    ours, work = training(name)
    spec, (bundle,) = flatten(
        ours.spec, [slot for slot in ours.piece.outputs if slot.kind is Kind.PARAM]
    )
    piece = lower(spec, [bundle.slot])
    tensors = {slot.key: torch.zeros(slot.shape) for slot in piece.inputs}
    tensors |= {k: v for k, v in ours.tensors.items() if k.startswith("hyper")}
    tensors[bundle.slot.key] = flat(ours.tensors, bundle, bundle.slot)
    for _ in range(5):
        gradients = {n: g.float() for n, g in work.gradients().items()}
        given = {f"gradient.{n}": g for n, g in gradients.items()}
        gradient = slots.gradient(bundle.slot)
        tensors[gradient.key] = flat(given, bundle, gradient)
        tensors |= piece.function(tensors)
        ours.step(gradients)
    for slot in piece.outputs:
        if slot.shape:
            torch.testing.assert_close(
                tensors[slot.key], flat(ours.tensors, bundle, slot), rtol=1e-6, atol=1e-9
            )
    count = sum(node.op == "call_function" for node in traced(piece).graph.nodes)
    assert count <= 60


def test_bundles_hold_one_group_and_dtype_each_at_aligned_places():
    weights = [torch.nn.Parameter(torch.zeros(n)) for n in (3, 65, 64)]
    weights.append(torch.nn.Parameter(torch.zeros(5).half()))
    optimizer = torch.optim.SGD([{"params": weights[:2]}, {"params": weights[2:]}], lr=0.1)
    parameters = dict(zip("abcd", weights, strict=True))
    ours = Training(optimizer, parameters)
    params = [slots.param(n, tuple(p.shape), p.dtype) for n, p in parameters.items()]
    spec, bundles = flatten(ours.spec, params)
    found = {b.slot.path: [(m.slot.path, m.offset) for m in b.members] for b in bundles}
    assert found == {
        "~0.float32.0": [("a", 0), ("b", 64)],
        "~1.float32.0": [("c", 0)],
        "~1.float16.0": [("d", 0)],
    }
    assert [b.slot.shape for b in bundles] == [(192,), (64,), (64,)]
    assert [g.params for g in spec.groups] == [("~0.float32.0",), ("~1.float32.0", "~1.float16.0")]


def test_every_kind_of_optimizer_has_its_algorithm() -> None:
    assert {kind.algorithm for kind in KINDS} == ALGORITHMS.keys()
