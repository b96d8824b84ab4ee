"""Layers, aggregations, norms, poolings and models of torch_geometric, through wrapped models.

Each is trained for three steps of gradient descent, and so is the same module in eager PyTorch, on
the same small graph. Results, losses and weights are compared. Arguments are made up from the names
of parameters; if that is not enough, they are in ``SPECIAL``. Exported names without a sample here
are in ``UNTRIED``, with the reason.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import nn
from torch_geometric.utils import scatter

import poptorch_geometric  # noqa: F401 (its substitutions)
from helpers.wrapping import Calling, Having

from . import checks

NODES, CHANNELS, GRAPHS, RELATIONS = 12, 8, 3, 2
Sample = tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]
E = "edge_index"


def _inputs() -> dict[str, Any]:
    """Return what is called what in the signatures of forward."""
    generator, batch = torch.Generator().manual_seed(0), torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    pairs = torch.randint(NODES, (2, 60), generator=generator)
    pairs = pairs[:, (batch[pairs[0]] == batch[pairs[1]]) & (pairs[0] != pairs[1])]
    pairs = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    pairs = pairs[:, pairs[1].argsort(stable=True)]
    edges, x = pairs.shape[1], torch.randn(NODES, CHANNELS, generator=generator)
    positions = torch.randn(NODES, 3, generator=generator)
    x0 = torch.randn(NODES, CHANNELS, generator=generator)
    dense = (torch.rand(GRAPHS, 5, 5, generator=generator) > 0.5).float()
    return {
        "x": x,
        "x_0": x0,
        "x0": x0,
        "edge_index": pairs,
        "batch": batch,
        "index": batch,
        "pos": positions,
        "normal": nn.functional.normalize(positions, dim=1),
        "edge_weight": torch.rand(edges, generator=generator) + 0.5,
        "edge_attr": torch.rand(edges, 4, generator=generator),
        "edge_type": torch.arange(edges) % RELATIONS,
        "batch_size": GRAPHS,
        "dim_size": GRAPHS,
        "max_num_elements": 6,
        "max_num_nodes": 6,
        "node_type": torch.arange(NODES) % RELATIONS,
        "type_vec": torch.arange(NODES) % RELATIONS,
        "dense_x": torch.randn(GRAPHS, 5, CHANNELS, generator=generator),
        "adj": ((dense + dense.transpose(1, 2)) > 0).float(),
        "z": torch.randint(1, 5, (NODES,), generator=generator),
        "pseudo": torch.rand(edges, 3, generator=generator),
        "single": x[:, 0],
        "four": torch.stack(
            [
                torch.randint(NODES, (4 * NODES,), generator=generator),
                torch.arange(NODES).repeat_interleave(4),
            ]
        ),
    }


INPUTS = _inputs()
_DEGREES = torch.bincount(torch.bincount(INPUTS["edge_index"][1], minlength=NODES))
# Values of constructors' parameters, by name; others keep their defaults.
ARGUMENTS: dict[str, Any] = {
    "in_channels": CHANNELS, "out_channels": CHANNELS, "channels": CHANNELS, "num_layers": 2,
    "hidden_channels": CHANNELS, "edge_dim": 4, "num_relations": RELATIONS, "num_types": RELATIONS,
    "K": 2, "heads": 2, "dim": 3, "kernel_size": 2, "in_dim": CHANNELS, "out_dim": CHANNELS,
    "num_groups": 2, "groups": 2, "k": 4, "shared_weights": True, "alpha": 0.1, "deg": _DEGREES,
    "aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"],
    "powers": [0, 1, 2], "num_node_types": 2, "num_edge_types": 2, "edge_type_emb_dim": 3,
    "edge_attr_emb_dim": 3,
}  # fmt: skip
OPTIONAL = {"edge_dim", "heads", "edge_attr", "edge_weight", "edge_type", "type_vec"}
"""Parameters of layers and norms that are given although they have a default."""


def _mlp(inputs: int = CHANNELS, outputs: int = CHANNELS) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.Tanh())


def _of(build: Callable[[], nn.Module], *inputs: str, **constants: Any) -> Sample:
    """A sample; by default of nodes and edges."""
    return build, inputs or ("x", E), constants


def _conv(name: str, *inputs: str, **arguments: Any) -> Sample:
    channels = {"in_channels": CHANNELS, "out_channels": CHANNELS}
    return _of(lambda: getattr(pyg, name)(**(channels | arguments)), *inputs)


def _aggregation(build: Callable[[], nn.Module], **constants: Any) -> Sample:
    return _of(build, "x", "index", dim_size=GRAPHS, **constants)


def _pooled(name: str) -> Sample:
    """Pools nodes, then sums over graphs: what is left over is compared."""

    def forward(own: Having, x: torch.Tensor, edge_index: torch.Tensor, batch: torch.Tensor) -> Any:
        x, edge_index, _, batch, *_ = own.pool(x, edge_index, batch=batch)
        return pyg.global_add_pool(x, batch, GRAPHS)

    return _of(lambda: Having(forward, pool=getattr(pyg, name)(CHANNELS)), "x", E, "batch")


def _triples(name: str) -> Sample:
    def forward(own: Having, edge_index: torch.Tensor, edge_type: torch.Tensor) -> Any:
        return own.inner(edge_index[0], edge_type, edge_index[1])

    made = getattr(pyg, name)
    return _of(lambda: Having(forward, inner=made(NODES, RELATIONS, 4)), E, "edge_type")


def _meta() -> nn.Module:
    def of_nodes(
        own: Having,
        x: torch.Tensor,
        edge_index: torch.Tensor,
        edge_attr: torch.Tensor,
        u: torch.Tensor,
        batch: torch.Tensor,
    ) -> Any:
        return own.layer(torch.cat([x, scatter(edge_attr, edge_index[1], 0, len(x))], 1))

    def of_edges(
        own: Having,
        source: torch.Tensor,
        target: torch.Tensor,
        edge_attr: torch.Tensor,
        u: torch.Tensor,
        batch: torch.Tensor,
    ) -> Any:
        return own.layer(torch.cat([source, target, edge_attr], 1))

    edges = Having(of_edges, layer=nn.Linear(2 * CHANNELS + 4, 4))
    return pyg.MetaLayer(edges, Having(of_nodes, layer=nn.Linear(CHANNELS + 4, 8)))


def _molecule() -> nn.Module:
    """Return the data of one molecule with known neighbours."""

    def neighbours(positions: torch.Tensor, batch: torch.Tensor) -> Any:
        source, target = INPUTS[E]
        return INPUTS[E], (positions[source] - positions[target]).norm(dim=1)

    model = pyg.SchNet(8, 8, 2, 5, interaction_graph=Calling(neighbours))
    model.readout = Calling(lambda x, index, dim: x.sum(dim, keepdim=True))
    return model


def _jumping() -> nn.Module:
    layers = {"one": pyg.SAGEConv(CHANNELS, 8), "two": pyg.SAGEConv(8, 8)}
    return Having(
        lambda own, x, edges: own.jump([one := own.one(x, edges), own.two(one, edges)]),
        jump=pyg.JumpingKnowledge("lstm", 8, 2),
        **layers,
    )


# Modules whose arguments are not plain.
SPECIAL: dict[str, Sample] = {
    "CGConv": _of(lambda: pyg.CGConv(CHANNELS, dim=4), "x", E, "edge_attr"),
    "DirGNNConv": _of(lambda: pyg.DirGNNConv(pyg.SAGEConv(CHANNELS, CHANNELS))),
    "DNAConv": _of(lambda: Having(lambda own, x, e: own.inner(torch.stack([x, 2 * x], dim=1), e),
                                  inner=pyg.DNAConv(CHANNELS, heads=2))),
    "EdgeConv": _of(lambda: pyg.EdgeConv(_mlp(2 * CHANNELS))),
    "FAConv": _of(lambda: pyg.FAConv(CHANNELS), "x", "x_0", E),
    "GINConv": _of(lambda: pyg.GINConv(_mlp(), train_eps=True)),
    "GINEConv": _of(lambda: pyg.GINEConv(_mlp(), edge_dim=4), "x", E, "edge_attr"),
    "GMMConv": _conv("GMMConv", "x", E, "pseudo", dim=3, kernel_size=2),
    "GPSConv": _of(lambda: pyg.GPSConv(CHANNELS, pyg.SAGEConv(CHANNELS, CHANNELS), 2, norm=None),
                   "x", E, "batch"),
    "GeneralConv": _conv("GeneralConv", "x", E, "edge_attr", in_edge_channels=4),
    "HypergraphConv": _of(lambda: pyg.HypergraphConv(CHANNELS, CHANNELS), num_edges=NODES),
    "MeshCNNConv": _of(lambda: pyg.MeshCNNConv(CHANNELS, CHANNELS), "x", "four"),
    "NNConv": _of(lambda: pyg.NNConv(CHANNELS, CHANNELS, _mlp(4, CHANNELS * CHANNELS)),
                  "x", E, "edge_attr"),
    "PointGNNConv": _of(lambda: pyg.PointGNNConv(_mlp(CHANNELS, 3), _mlp(CHANNELS + 3), _mlp()),
                        "x", "pos", E),
    "SignedConv": _conv("SignedConv", "x", E, E, first_aggr=True),
    "HeteroDictLinear": _of(lambda: Having(lambda own, x: own.inner({"a": x, "b": 2 * x}),
                            inner=pyg.HeteroDictLinear(CHANNELS, 4, ["a", "b"])), "x"),
    "MLP": _of(lambda: pyg.MLP([CHANNELS, 8, 4], norm="layer_norm"), "x"),
    "AttentionalAggregation": _aggregation(lambda: pyg.AttentionalAggregation(_mlp(CHANNELS, 1))),
    "DeepSetsAggregation": _aggregation(lambda: pyg.DeepSetsAggregation(_mlp(), _mlp())),
    "DegreeScalerAggregation": _aggregation(lambda: pyg.DegreeScalerAggregation(
        ["mean", "max"], ["identity", "linear"], _DEGREES)),
    "MLPAggregation": _aggregation(lambda: pyg.MLPAggregation(CHANNELS, 4, 6, num_layers=1)),
    "MultiAggregation": _aggregation(lambda: pyg.MultiAggregation(["mean", "max", "std"])),
    "PatchTransformerAggregation": _aggregation(lambda: pyg.PatchTransformerAggregation(
        CHANNELS, 4, 2, 8, num_transformer_blocks=1, heads=2), max_num_elements=6),
    "Set2Set": _aggregation(lambda: pyg.Set2Set(CHANNELS, 2)),
    "QuantileAggregation": _aggregation(lambda: pyg.QuantileAggregation([0.2, 0.5])),
    "PowerMeanAggregation": _of(lambda: Having(
        lambda own, x, index: own.inner(x.exp(), index, dim_size=GRAPHS),
        inner=pyg.PowerMeanAggregation(2.0, learn=True)), "x", "index"),
    "EquilibriumAggregation": _aggregation(lambda: pyg.EquilibriumAggregation(CHANNELS, 4, [8], 2)),
    "PMLP": _of(lambda: pyg.PMLP(CHANNELS, 8, 4, 2)),
    "MessageNorm": _of(lambda: pyg.MessageNorm(True), "x", "x_0"),
    "MemPooling": _of(lambda: pyg.MemPooling(CHANNELS, 4, 2, 3), "x", "batch",
                      batch_size=GRAPHS, max_num_nodes=6),
    **{name: _pooled(name) for name in ("SAGPooling", "TopKPooling", "ASAPooling")},
    "DMoNPooling": _of(lambda: pyg.DMoNPooling(CHANNELS, 3), "dense_x", "adj"),
    "DenseGATConv": _conv("DenseGATConv", "dense_x", "adj", heads=2),
    "DenseGINConv": _of(lambda: pyg.DenseGINConv(_mlp()), "dense_x", "adj"),
    **{name: _conv(name, "dense_x", "adj") for name in (
        "DenseGCNConv", "DenseGraphConv", "DenseSAGEConv")},
    "AttentiveFP": _of(lambda: pyg.AttentiveFP(CHANNELS, 8, 2, 4, 2, 2),
                       "x", E, "edge_attr", "batch"),
    "DeepGCNLayer": _of(lambda: pyg.DeepGCNLayer(
        pyg.GENConv(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS), nn.ReLU(), block="res+")),
    "GAT": _of(lambda: pyg.GAT(CHANNELS, 8, 2, heads=2)),
    "JumpingKnowledge": _of(_jumping),
    "LightGCN": _of(lambda: Having(lambda own, edges: own.inner(edges, edges),
                                   inner=pyg.LightGCN(NODES, 8, 2)), E),
    "LINKX": _of(lambda: pyg.LINKX(NODES, CHANNELS, 8, 4, 1)),
    "MaskLabel": _of(lambda: Having(
        lambda own, x: own.inner(x, torch.arange(NODES) % 3, torch.arange(NODES) < 6),
        inner=pyg.MaskLabel(3, CHANNELS)), "x"),
    "PNA": _of(lambda: pyg.PNA(CHANNELS, 8, 2, aggregators=["mean", "max"], scalers=["identity"],
                               deg=_DEGREES)),
    "PositionalEncoding": _of(lambda: pyg.PositionalEncoding(CHANNELS), "single"),
    "TemporalEncoding": _of(lambda: pyg.TemporalEncoding(CHANNELS), "single"),
    "GraphUNet": _of(lambda: pyg.GraphUNet(CHANNELS, 8, 4, 2), "x", E, "batch"),
    "GroupAddRev": _of(lambda: pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2)),
    "InnerProductDecoder": _of(lambda: pyg.InnerProductDecoder()),
    "GAE": _of(lambda: Having(lambda own, x, e: own.inner.decode(own.inner.encode(x, e), e),
                              inner=pyg.GAE(pyg.GCNConv(CHANNELS, 4)))),
    "MetaLayer": _of(_meta, "x", E, "edge_attr"),
    "SchNet": _of(_molecule, "z", "pos"),
    "DeepGraphInfomax": _of(lambda: pyg.DeepGraphInfomax(
        8, pyg.SAGEConv(CHANNELS, 8), summary=lambda z, *_: z.mean(0).sigmoid(),
        corruption=lambda x, edges: (x.flip(0), edges))),
    "Polynormer": _of(lambda: pyg.Polynormer(CHANNELS, 8, 4, 2, 1, 0.0, 0.0, 0.0), "x", E, "batch"),
    **{name: _triples(name) for name in ("ComplEx", "DistMult", "RotatE", "TransE")},
}  # fmt: skip
_PLUGIN = "torch_geometric itself refuses without a compiled plug-in (pyg-lib)"
_BASE = "a base class, or what other modules are put into"
_TYPES = "several types of nodes: tests/geometric/test_models.py runs it"
_HOST = "looks at values on the host: negative samples, sparse tensors, searches"
UNTRIED: dict[str, str] = {
    **dict.fromkeys(("DynamicEdgeConv", "GravNetConv", "XConv", "SplineConv", "Node2Vec",
                     "ViSNet"), _PLUGIN),
    **dict.fromkeys(("CuGraphGATConv", "CuGraphRGCNConv", "CuGraphSAGEConv", "FusedGATConv"),
                    "layers of other libraries, for GPUs"),
    **dict.fromkeys(("MessagePassing", "Aggregation", "KGEModel"), _BASE),
    **dict.fromkeys(("HANConv", "HGTConv", "HeteroConv"), _TYPES),
    "HeteroJumpingKnowledge": "several types of nodes: JumpingKnowledge by type",
    **dict.fromkeys(("CorrectAndSmooth", "LabelPropagation"),
                    "no weights and no gradient: for labels, after training"),
    "PANPooling": "takes what PANConv gives, a sparse tensor",
    "ClusterPooling": "needs scipy",
    "WLConv": "no weights and no gradient: hashes colours on the host",
    "PANConv": "takes and gives sparse tensors only",
    **dict.fromkeys(("DimeNet", "DimeNetPlusPlus", "MetaPath2Vec", "SignedGCN", "LPFormer"), _HOST),
    **dict.fromkeys(("ARGA", "ARGVA", "VGAE"), "GAE with random numbers and a second optimizer"),
    **dict.fromkeys(("GNNFF", "GPSE", "GPSENodeEncoder", "RENet", "NeuralFingerprint",
                     "ARLinkPredictor", "TGNMemory"), "no sample here"),
}  # fmt: skip


def names() -> dict[str, Sample]:
    """Everything that is tried, by name."""
    plain = {name: kind for name, kind in exported().items() if name not in SPECIAL | UNTRIED}
    return SPECIAL | {name: _plain(kind) for name, kind in plain.items()}


def exported() -> dict[str, type[nn.Module]]:
    """Every module that torch_geometric exports, by name."""
    classes = {}
    for owner in (
        pyg.conv,
        pyg.aggr,
        pyg.norm,
        pyg.pool,
        pyg.models,
        pyg.dense,
        pyg.kge,
        pyg.encoding,
    ):
        for name in getattr(owner, "__all__", dir(owner)):
            kind = getattr(owner, name, None)
            is_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
            if is_module and kind.__module__.startswith("torch_geometric"):
                classes[name] = kind
    return classes


def _plain(kind: type[nn.Module]) -> Sample:
    """A sample whose arguments and inputs follow from the names of parameters."""
    takes, of_kind = inspect.signature(kind.forward).parameters, kind.__module__.split(".")[2]
    given = OPTIONAL if of_kind in ("conv", "norm") else set()

    def expected(parameters: Mapping[str, inspect.Parameter], values: dict[str, Any]) -> list[str]:
        each = parameters.items()
        return [n for n, p in each if n in values and (p.default is p.empty or n in given)]

    named = expected(inspect.signature(kind.__init__).parameters, ARGUMENTS)
    arguments = {name: ARGUMENTS[name] for name in named}
    numbers = {"aggr": "index", "norm": "batch"}.get(of_kind)
    if numbers in takes:
        sizes = [n for n in ("dim_size", "batch_size", "max_num_elements") if n in takes]
        return lambda: kind(**arguments), ("x", numbers), {name: INPUTS[name] for name in sizes}
    return lambda: kind(**arguments), tuple(expected(takes, INPUTS)), {}


def samples(name: str, most: int) -> Iterator[Sample]:
    yield names()[name]


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield how training three steps went."""
    build, names, constants = sample
    torch.manual_seed(checks.SEED)
    inputs = tuple(INPUTS[name] for name in names), constants
    model = checks.Trained(build(), inputs).train()
    yield "training", checks.problem_of(lambda: checks.check_training(model, [inputs] * 3, 0.01))
