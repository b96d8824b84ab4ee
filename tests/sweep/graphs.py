"""Layers, aggregations, norms, poolings and models of torch_geometric, through wrapped models.

Each is trained for three steps of gradient descent beside the same module, eager, on the same small
graph; results, losses and weights are compared. Arguments are made up from the names of parameters,
and where that is not enough they stand in ``SPECIAL``. What is exported and has no sample here is
in ``UNTRIED``, with the reason.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch_geometric.nn as pyg
from torch import nn

import poptorch_geometric  # noqa: F401 (its substitutions)

from . import checks

NODES, CHANNELS, GRAPHS, RELATIONS = 12, 8, 3, 2


def _inputs() -> dict[str, Any]:
    """Return what is called what in the signatures of forward."""
    generator = torch.Generator().manual_seed(0)
    batch = torch.tensor([0] * 5 + [1] * 4 + [2] * 3)
    pairs = torch.randint(NODES, (2, 60), generator=generator)
    pairs = pairs[:, (batch[pairs[0]] == batch[pairs[1]]) & (pairs[0] != pairs[1])]
    pairs = torch.unique(torch.cat([pairs, pairs.flip(0)], dim=1), dim=1)
    pairs = pairs[:, pairs[1].argsort(stable=True)]
    edges = pairs.shape[1]
    x = torch.randn(NODES, CHANNELS, generator=generator)
    positions = torch.randn(NODES, 3, generator=generator)
    x0 = torch.randn(NODES, CHANNELS, generator=generator)
    dense = (torch.rand(GRAPHS, 5, 5, generator=generator) > 0.5).float()
    return {
        "x": x, "x_0": x0, "x0": x0, "edge_index": pairs, "batch": batch, "index": batch,
        "pos": positions, "normal": nn.functional.normalize(positions, dim=1),
        "edge_weight": torch.rand(edges, generator=generator) + 0.5,
        "edge_attr": torch.rand(edges, 4, generator=generator),
        "edge_type": torch.arange(edges) % RELATIONS,
        "batch_size": GRAPHS, "dim_size": GRAPHS, "max_num_elements": 6, "max_num_nodes": 6,
        "node_type": torch.arange(NODES) % RELATIONS, "type_vec": torch.arange(NODES) % RELATIONS,
        "dense_x": torch.randn(GRAPHS, 5, CHANNELS, generator=generator),
        "adj": ((dense + dense.transpose(1, 2)) > 0).float(),
        "z": torch.randint(1, 5, (NODES,), generator=generator),
        "pseudo": torch.rand(edges, 3, generator=generator),
        "single": x[:, :1],
    }  # fmt: skip


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


Sample = tuple[Callable[[], nn.Module], tuple[str, ...], dict[str, Any]]
E = "edge_index"


def _conv(name: str, inputs: tuple[str, ...] = ("x", E), **arguments: Any) -> Sample:
    return (lambda: getattr(pyg, name)(**arguments), inputs, {})


_C = {"in_channels": CHANNELS, "out_channels": CHANNELS}
# Modules whose arguments are not plain.
SPECIAL: dict[str, Sample] = {
    "CGConv": _conv("CGConv", ("x", E, "edge_attr"), channels=CHANNELS, dim=4),
    "DirGNNConv": (lambda: pyg.DirGNNConv(pyg.SAGEConv(CHANNELS, CHANNELS)), ("x", E), {}),
    "DNAConv": (lambda: _Reshaped(pyg.DNAConv(CHANNELS, heads=2)), ("x", E), {}),
    "EdgeConv": (lambda: pyg.EdgeConv(_mlp(2 * CHANNELS)), ("x", E), {}),
    "FAConv": _conv("FAConv", ("x", "x_0", E), channels=CHANNELS),
    "GINConv": (lambda: pyg.GINConv(_mlp(), train_eps=True), ("x", E), {}),
    "GINEConv": (lambda: pyg.GINEConv(_mlp(), edge_dim=4), ("x", E, "edge_attr"), {}),
    "GMMConv": _conv("GMMConv", ("x", E, "pseudo"), dim=3, kernel_size=2, **_C),
    "GPSConv": (lambda: pyg.GPSConv(CHANNELS, pyg.SAGEConv(CHANNELS, CHANNELS), heads=2,
                                    norm=None), ("x", E, "batch"), {}),
    "GeneralConv": _conv("GeneralConv", ("x", E, "edge_attr"), in_edge_channels=4, **_C),
    "HypergraphConv": (lambda: pyg.HypergraphConv(CHANNELS, CHANNELS), ("x", E),
                       {"num_edges": NODES}),
    "MeshCNNConv": (lambda: pyg.MeshCNNConv(CHANNELS, CHANNELS), ("x", "four"), {}),
    "NNConv": (lambda: pyg.NNConv(CHANNELS, CHANNELS, _mlp(4, CHANNELS * CHANNELS)),
               ("x", E, "edge_attr"), {}),
    "PointGNNConv": (lambda: pyg.PointGNNConv(_mlp(CHANNELS, 3), _mlp(CHANNELS + 3), _mlp()),
                     ("x", "pos", E), {}),
    "SignedConv": _conv("SignedConv", ("x", E, E), first_aggr=True, **_C),
    "HeteroDictLinear": (lambda: _OfTypes(pyg.HeteroDictLinear(CHANNELS, 4, ["a", "b"])), ("x",),
                         {}),
    "MLP": (lambda: pyg.MLP([CHANNELS, 8, 4], norm="layer_norm"), ("x",), {}),
    # aggregations: (x, index, None, dim_size)
    "AttentionalAggregation": (lambda: pyg.AttentionalAggregation(_mlp(CHANNELS, 1)),
                               ("x", "index"), {"dim_size": GRAPHS}),
    "DeepSetsAggregation": (lambda: pyg.DeepSetsAggregation(_mlp(), _mlp()), ("x", "index"),
                            {"dim_size": GRAPHS}),
    "DegreeScalerAggregation": (
        lambda: pyg.DegreeScalerAggregation(["mean", "max"], ["identity", "linear"], _DEGREES),
        ("x", "index"), {"dim_size": GRAPHS}),
    "MLPAggregation": (
        lambda: pyg.MLPAggregation(CHANNELS, 4, 6, num_layers=1), ("x", "index"),
        {"dim_size": GRAPHS}),
    "MultiAggregation": (lambda: pyg.MultiAggregation(["mean", "max", "std"], mode="cat"),
                         ("x", "index"), {"dim_size": GRAPHS}),
    "PatchTransformerAggregation": (
        lambda: pyg.PatchTransformerAggregation(CHANNELS, 4, 2, 8, num_transformer_blocks=1,
                                                heads=2), ("x", "index"),
        {"dim_size": GRAPHS, "max_num_elements": 6}),
    "Set2Set": (lambda: pyg.Set2Set(CHANNELS, 2), ("x", "index"), {"dim_size": GRAPHS}),
    "QuantileAggregation": (lambda: pyg.QuantileAggregation([0.2, 0.5]), ("x", "index"),
                            {"dim_size": GRAPHS}),
    "PowerMeanAggregation": (lambda: _Positive(pyg.PowerMeanAggregation(2.0, learn=True)),
                             ("x", "index"), {"dim_size": GRAPHS}),
    "EquilibriumAggregation": (lambda: pyg.EquilibriumAggregation(CHANNELS, 4, [8], 2),
                               ("x", "index"), {"dim_size": GRAPHS}),
    "PMLP": (lambda: pyg.PMLP(CHANNELS, 8, 4, 2), ("x", E), {}),
    # norms
    "MessageNorm": (lambda: pyg.MessageNorm(True), ("x", "x_0"), {}),
    # poolings
    "MemPooling": (lambda: pyg.MemPooling(CHANNELS, 4, 2, 3), ("x", "batch"),
                   {"batch_size": GRAPHS, "max_num_nodes": 6}),
    "SAGPooling": (lambda: _Pooled(pyg.SAGPooling(CHANNELS)), ("x", E, "batch"), {}),
    "TopKPooling": (lambda: _Pooled(pyg.TopKPooling(CHANNELS)), ("x", E, "batch"), {}),
    "ASAPooling": (lambda: _Pooled(pyg.ASAPooling(CHANNELS)), ("x", E, "batch"), {}),
    # dense
    "DMoNPooling": (lambda: pyg.DMoNPooling(CHANNELS, 3), ("dense_x", "adj"), {}),
    "DenseGATConv": _conv("DenseGATConv", ("dense_x", "adj"), heads=2, **_C),
    "DenseGCNConv": _conv("DenseGCNConv", ("dense_x", "adj"), **_C),
    "DenseGINConv": (lambda: pyg.DenseGINConv(_mlp()), ("dense_x", "adj"), {}),
    "DenseGraphConv": _conv("DenseGraphConv", ("dense_x", "adj"), **_C),
    "DenseSAGEConv": _conv("DenseSAGEConv", ("dense_x", "adj"), **_C),
    # models
    "AttentiveFP": (lambda: pyg.AttentiveFP(CHANNELS, 8, 2, 4, 2, 2), (
        "x", E, "edge_attr", "batch"), {}),
    "DeepGCNLayer": (lambda: pyg.DeepGCNLayer(
        pyg.GENConv(CHANNELS, CHANNELS), nn.LayerNorm(CHANNELS), nn.ReLU(), block="res+"),
        ("x", E), {}),
    "EdgeCNN": _conv("EdgeCNN", in_channels=CHANNELS, hidden_channels=8, num_layers=2),
    "GAT": _conv("GAT", in_channels=CHANNELS, hidden_channels=8, num_layers=2, heads=2),
    "GCN": _conv("GCN", in_channels=CHANNELS, hidden_channels=8, num_layers=2),
    "GIN": _conv("GIN", in_channels=CHANNELS, hidden_channels=8, num_layers=2),
    "GraphSAGE": _conv("GraphSAGE", in_channels=CHANNELS, hidden_channels=8, num_layers=2),
    "JumpingKnowledge": (lambda: _Jumping(), ("x", E), {}),
    "LightGCN": (lambda: _Light(), (E,), {}),
    "LINKX": (lambda: pyg.LINKX(NODES, CHANNELS, 8, 4, 1), ("x", E), {}),
    "MaskLabel": (lambda: _Masked(), ("x",), {}),
    "PNA": _conv("PNA", in_channels=CHANNELS, hidden_channels=8, num_layers=2,
                 aggregators=["mean", "max"], scalers=["identity"], deg=_DEGREES),
    "PositionalEncoding": (lambda: _Scaled(pyg.PositionalEncoding(CHANNELS)), ("single",), {}),
    "TemporalEncoding": (lambda: _Scaled(pyg.TemporalEncoding(CHANNELS)), ("single",), {}),
    "GraphUNet": (lambda: pyg.GraphUNet(CHANNELS, 8, 4, 2), ("x", E, "batch"), {}),
    "GroupAddRev": (lambda: pyg.GroupAddRev(pyg.SAGEConv(4, 4), num_groups=2), ("x", E), {}),
    "InnerProductDecoder": (lambda: _Scaled(pyg.InnerProductDecoder()), ("x", E), {}),
    "GAE": (lambda: _Encoded(pyg.GAE(pyg.GCNConv(CHANNELS, 4))), ("x", E), {}),
    "MetaLayer": (lambda: _Meta(), ("x", E, "edge_attr"), {}),
    "SchNet": (lambda: _one_molecule(), (
        "z", "pos"), {}),
    "DeepGraphInfomax": (lambda: _Infomax(), ("x", E), {}),
    "Polynormer": (lambda: pyg.Polynormer(CHANNELS, 8, 4, 2, 1, 0.0, 0.0, 0.0), (
        "x", E, "batch"), {}),
    "ComplEx": (lambda: _Triples("ComplEx"), (E, "edge_type"), {}),
    "DistMult": (lambda: _Triples("DistMult"), (E, "edge_type"), {}),
    "RotatE": (lambda: _Triples("RotatE"), (E, "edge_type"), {}),
    "TransE": (lambda: _Triples("TransE"), (E, "edge_type"), {}),
}  # fmt: skip
INPUTS["four"] = torch.stack([torch.randint(NODES, (4 * NODES,), generator=torch.Generator()
                                            .manual_seed(2)),
                              torch.arange(NODES).repeat_interleave(4)])  # fmt: skip


class _Wrapping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class _Reshaped(_Wrapping):
    """For a layer that takes the results of several layers before it."""

    def forward(self, x, edge_index):
        return self.inner(torch.stack([x, 2 * x], dim=1), edge_index)


class _Positive(_Wrapping):
    def forward(self, x, index, **sizes):
        return self.inner(x.exp(), index, **sizes)


class _OfTypes(_Wrapping):
    def forward(self, x):
        return self.inner({"a": x, "b": 2 * x})


class _Pooled(_Wrapping):
    """Pools nodes, then sums over graphs: what is left over is compared."""

    def forward(self, x, edge_index, batch):
        x, edge_index, _, batch, *_ = self.inner(x, edge_index, batch=batch)
        return pyg.global_add_pool(x, batch, GRAPHS)


class _Scaled(_Wrapping):
    """Gives something to train to what has no weights."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x, *rest):
        return self.inner(self.scale * (x[:, 0] if x.shape[1] == 1 else x), *rest)


class _Encoded(_Wrapping):
    def forward(self, x, edge_index):
        return self.inner.decode(self.inner.encode(x, edge_index), edge_index)


class _Jumping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = pyg.SAGEConv(CHANNELS, 8), pyg.SAGEConv(8, 8)
        self.jump = pyg.JumpingKnowledge("lstm", 8, 2)

    def forward(self, x, edge_index):
        one = self.one(x, edge_index)
        return self.jump([one, self.two(one, edge_index)])


class _Light(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = pyg.LightGCN(NODES, 8, 2)

    def forward(self, edge_index):
        return self.inner(edge_index, edge_index)


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = pyg.MaskLabel(3, CHANNELS)

    def forward(self, x):
        return self.inner(x, torch.arange(NODES) % 3, torch.arange(NODES) < 6)


class _Meta(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        edge, node = nn.Linear(2 * CHANNELS + 4, 4), nn.Linear(CHANNELS + 4, 8)
        self.edge, self.node = edge, node
        self.inner = pyg.MetaLayer(self._of_edges, self._of_nodes)

    def _of_edges(self, source, target, edge_attr, u, batch):
        return self.edge(torch.cat([source, target, edge_attr], 1))

    def _of_nodes(self, x, edge_index, edge_attr, u, batch):
        from torch_geometric.utils import scatter

        return self.node(torch.cat([x, scatter(edge_attr, edge_index[1], 0, len(x))], 1))

    def forward(self, x, edge_index, edge_attr):
        return self.inner(x, edge_index, edge_attr)[0]


def _one_molecule() -> nn.Module:
    """With the number of molecules where the readout takes it."""
    model = pyg.SchNet(8, 8, 2, 5, interaction_graph=_Neighbours())
    model.readout = _Readout()
    return model


class _Readout(pyg.SumAggregation):
    def __call__(self, x, index=None, dim=-2):
        return super().__call__(x, index, dim_size=1, dim=dim)


class _Neighbours(nn.Module):
    def forward(self, positions, batch):
        edges = INPUTS[E]
        return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=1)


class _Infomax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = pyg.DeepGraphInfomax(
            8, pyg.SAGEConv(CHANNELS, 8), summary=lambda z, *_: z.mean(0).sigmoid(),
            corruption=lambda x, edges: (x.flip(0), edges),
        )  # fmt: skip

    def forward(self, x, edge_index):
        return self.inner(x, edge_index)


class _Triples(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = getattr(pyg, name)(NODES, RELATIONS, 4)

    def forward(self, edge_index, edge_type):
        return self.inner(edge_index[0], edge_type, edge_index[1])


_PLUGIN = "torch_geometric itself refuses without a compiled plug-in (pyg-lib)"
_BASE = "a base class, or what other modules are put into"
_TYPES = "several types of nodes: tests/geometric/test_models.py trains or runs it"
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
    plain = {
        name: kind
        for name, kind in exported().items()
        if name not in SPECIAL and name not in UNTRIED
    }
    return SPECIAL | {name: _plain(kind) for name, kind in plain.items()}


def exported() -> dict[str, type[nn.Module]]:
    """Every module that torch_geometric exports, by name."""
    classes = {}
    for owner in (pyg.conv, pyg.aggr, pyg.norm, pyg.pool, pyg.models, pyg.dense, pyg.kge,
                  pyg.encoding):  # fmt: skip
        for name in getattr(owner, "__all__", dir(owner)):
            kind = getattr(owner, name, None)
            is_module = inspect.isclass(kind) and issubclass(kind, nn.Module)
            if is_module and kind.__module__.startswith("torch_geometric"):
                classes[name] = kind
    return classes


def _plain(kind: type[nn.Module]) -> Sample:
    """A sample whose arguments and inputs follow from the names of parameters."""
    takes = inspect.signature(kind.forward).parameters
    of_kind = kind.__module__.split(".")[2]
    given = OPTIONAL if of_kind in ("conv", "norm") else set()

    def wanted(parameters: Mapping[str, inspect.Parameter], values: dict[str, Any]) -> list[str]:
        each = parameters.items()
        return [n for n, p in each if n in values and (p.default is p.empty or n in given)]

    named = wanted(inspect.signature(kind.__init__).parameters, ARGUMENTS)
    arguments = {name: ARGUMENTS[name] for name in named}
    if of_kind == "aggr":
        sizes = [name for name in ("dim_size", "max_num_elements") if name in takes]
        return lambda: kind(**arguments), ("x", "index"), {name: INPUTS[name] for name in sizes}
    if of_kind == "norm" and "batch" in takes:
        sizes = [name for name in ("dim_size", "batch_size") if name in takes]
        return lambda: kind(**arguments), ("x", "batch"), {name: INPUTS[name] for name in sizes}
    return lambda: kind(**arguments), tuple(wanted(takes, INPUTS)), {}


def samples(name: str, most: int) -> Iterator[Sample]:
    """Yield the sample of a name."""
    yield names()[name]


def tried(sample: Sample) -> Iterator[tuple[str, str | None]]:
    """Yield how training three steps went."""
    build, names, constants = sample
    torch.manual_seed(checks.SEED)
    inputs = tuple(INPUTS[name] for name in names), constants
    model = checks.Trained(build(), inputs).train()
    yield "training", checks.problem_of(lambda: checks.check_training(model, [inputs] * 3, 0.01))
