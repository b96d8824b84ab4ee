"""What does not work and why: all that a sweep found wanting, here only as long as that is true."""

_SHAPE = "the shape of its result depends on values; refused by design, with an explanation"
_SPARSE = "sparse tensors are refused, as in PopTorch"
_RANK = "the shape of its results depends on the rank that it finds"
OPERATORS = {
    **dict.fromkeys(("argwhere", "masked_select", "nonzero"), _SHAPE),
    **dict.fromkeys(("unique", "unique_consecutive"), _SHAPE),
    **dict.fromkeys(("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"), _SPARSE),
    **dict.fromkeys(("linalg.lstsq", "linalg.lstsq.grad_oriented"), _RANK),
    "__getitem__": "the values of a mask decide how many elements it selects; refused by design",
    "index_fill": "the gradient of a filling tensor looks for unique indices, whose number varies",
    "index_put": "the gradient of values that are put where a mask says selects with the mask",
    "repeat_interleave": "repetitions that are an input of the model: as tensor_split",
    "tensor_split": "sections that are an input of the model: sizes would depend on values",
}
_ROWS = "dynamic: how many graphs there are is read from the numbers of graphs"
_DENSE = "dynamic: selects the rows of a dense batch that a mask says"
GRAPHS = {
    "ASAPooling": "dynamic: counts graphs, and multiplies sparse matrices of unknown size",
    "AttentiveFP": _ROWS,
    "EdgePooling": "dynamic: merges edges one by one, as their scores say",
    "GPSConv": _DENSE,
    "GraphUNet": "dynamic: squares a sparse adjacency, whose entries are not known before",
    "GroupAddRev": "reversible layers free the memory of their inputs while autograd is traced",
    "SGFormer": _DENSE,
    "SuperGATConv": "dynamic: draws negative edges, in training",
}
