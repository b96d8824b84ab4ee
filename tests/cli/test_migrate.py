"""``poptorch migrate``: new scripts train as the old ones did, without poptorch."""

import contextlib
import io
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import poptorch.testing
from helpers.closeness import near
from helpers.source_tree import ROOT
from poptorch._cli.main import main
from poptorch._migrate.meanings import ROWS, here, meaning, named
from poptorch.options.overview import settings

HEAD = """
import torch
import poptorch
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(96, 8), torch.randint(3, (96,)))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = torch.nn.Linear(8, 16), torch.nn.Linear(16, 3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x, y=None):
        scores = self.two(torch.relu(self.one(x)))
        if y is None:
            return self.drop(scores)
        return scores, torch.nn.functional.cross_entropy(scores, y)

model = Net()
"""
PLAIN = """
def prepared(own, size):
    own.Training.gradientAccumulation(size)
    return poptorch.DataLoader(own, data, 2, shuffle=True, mode=poptorch.DataLoaderMode.Sync)

options = poptorch.Options().deviceIterations(2).enableExecutableCaching("cache")
loader = prepared(options, size=3)  # batches of 12
optimizer = poptorch.optim.SGD(
    model.parameters(), 0.1, momentum=0.9, loss_scaling=8.0, use_combined_accum=False
)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
optimizer.variable_attrs.markAsConstant("momentum")
training_model = poptorch.trainingModel(model, options, optimizer)
losses = []
for x, y in loader:
    losses.append(training_model(x, y))
    schedule.step()
    training_model.setOptimizer(optimizer)
training_model.copyWeightsToHost()
results = losses, model.state_dict()
"""
INFERENCE = """
import poptorch as pt
from poptorch import Options as Settings

first = data.tensors[0]
model.eval()
model = pt.inferenceModel(model, options=Settings().deviceIterations(4))
final = Settings().deviceIterations(3).outputMode(pt.OutputMode.Final)
last = pt.inferenceModel(Net().eval(), final)
results = model(first), last(first), *map(model, pt.DataLoader(pt.Options(), first, 96))
"""
BLOCKS = """
class Placed(Net):
    def forward(self, x, y):
        with poptorch.Block("first", ipu_id=0):
            x = poptorch.recomputationCheckpoint(torch.relu(self.one(x)))
        with poptorch.Block("second", ipu_id=1):  # the loss, too
            scores = self.two(x)
            each = torch.nn.functional.cross_entropy(scores, y, reduction="none")
            return poptorch.identity_loss(0.5 * each + 1, reduction="mean"), scores

    @poptorch.BlockFunction("unused")
    def more(self): ...

model, options = Placed(), poptorch.Options()
model.two = poptorch.BeginBlock(model.two, "second", ipu_id=1)
options.deviceIterations(2).outputMode(poptorch.OutputMode.All)
options.Training.gradientAccumulation(4)
strategy = poptorch.PipelinedExecution(poptorch.Stage("first").ipu(0), poptorch.Stage("second"))
options.setExecutionStrategy(strategy)
training = poptorch.trainingModel(model, options=options)
results = [training(*data.tensors) for _ in range(2)], model.state_dict()
"""
CUSTOM = """
class Sum(Net):
    def forward(self, x, y):
        scores = super().forward(x, y)[0]
        loss = scores.square().sum() + poptorch.serializedMatMul(
            scores, scores.t(), poptorch.MatMulSerializationMode.ReducingDim
        ).sum()
        return {"scores": scores, "loss": poptorch.identity_loss(loss * 1e-3, "none")}

class Trainer:
    def __init__(self, options: poptorch.Options) -> None:
        self.options, self.rows = options, 4
        self.opts = options.clone().replicationFactor(2)
        self.opts.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)

    def train(self):
        model = Sum()
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01, accum_type=torch.float32)
        self.training = poptorch.trainingModel(model, self.opts, optimizer)
        loader = poptorch.DataLoader(
            self.opts,
            data,
            batch_size=self.rows + 2,
        )
        kept = [self.training(*batch) for batch in loader]
        self.training.destroy()
        return kept, model.state_dict()

results = Trainer(poptorch.Options()).train()
"""


def migrated(script: Path, *, todo: int = 0) -> Path:
    """Write the new script next to the old one, and compare its number of TODOs."""
    new = script.with_name(f"plain_{script.name}")
    with contextlib.redirect_stdout(io.StringIO()):
        assert main(["migrate", "-o", str(new), str(script)]) == 0
    assert new.read_text().count("# TODO: ") == todo
    return new


def both(old: Path, new: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict]:
    """Return what variables the two scripts have at their end."""
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    before = runpy.run_path(str(old))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "poptorch", None)  # it cannot be imported
        return before, runpy.run_path(str(new))


@pytest.mark.slow
@pytest.mark.numeric
@pytest.mark.parametrize("text, todo", [(PLAIN, 0), (INFERENCE, 0), (BLOCKS, 0), (CUSTOM, 1)])
def test_the_new_script_computes_the_same_as_the_old_one(
    text: str, todo: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "script.py"
    script.write_text(HEAD + text)
    old, new = both(script, migrated(script, todo=todo), monkeypatch)
    torch.testing.assert_close(new["results"], old["results"], **near(32, 8))


def notebook() -> str:
    """Return the code of the tutorial that ports a script."""
    cells = json.loads((ROOT / "docs/tutorials/port.ipynb").read_text())["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")


def quick_start() -> str:
    """Return the code of the quick start up to the comparison of the results."""
    page = (ROOT / "docs/quick_start.md").read_text().split("## 5.")[0]
    blocks = [part.split("```")[0].partition("\n")[2] for part in page.split("```python")[1:]]
    return "\n".join([*blocks, "same = right"])


@pytest.mark.larger("test_an_example_can_be_migrated")
@pytest.mark.parametrize("text_of", [quick_start, notebook])
def test_a_tutorial_can_be_migrated(
    text_of: Callable[[], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(text_of())

    old, plain = both(script, migrated(script), monkeypatch)

    assert old["same"] == plain["same"]
    weights = [each["model"].state_dict() for each in (plain, old)]
    torch.testing.assert_close(*weights, **near(64, 100))


def test_an_example_can_be_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = tmp_path / "example.py"
    example.write_text((ROOT / "examples/fashion_mnist/poptorch_ipu.py").read_text())
    args = SimpleNamespace(seed=10, batch_size=4, lr=0.01, momentum=0.9, epochs=1, passes=1)
    images = torch.utils.data.TensorDataset(torch.randn(16, 1, 28, 28), torch.arange(16) % 10)
    data = SimpleNamespace(train=images, test=images)

    old, plain = both(example, migrated(example, todo=1), monkeypatch)
    losses = [next(each["epochs"](args, data)).losses for each in (plain, old)]

    assert len(losses[0]) == 4
    torch.testing.assert_close(*losses, **near(972, 10))


UNSURE = """
import poptorch
from poptorch import OutputMode
options = poptorch.Options()  # kept
options.anchorTensor("a", "b")
mode = OutputMode.Sum
options.outputMode(mode)
wide = options.deviceIterations(2) if mode else options
if mode:
    poptorch.setLogLevel("ERR")
elif poptorch.for_loop(2, abs, []):
    pass
loss = poptorch.identity_loss(value + 1, reduction="sum")
loss *= 2
elsewhere = poptorch.trainingModel(value, value.options)
loader = poptorch.DataLoader(options, [], batch_sampler=[])
optimizer = poptorch.optim.SGD([], lr=1, max_grad_norm=0.5)
printed = poptorch.ipu_print_tensor(value)
"""
SURE = """\
options = Loops()  # kept
# TODO: Options.anchorTensor("a", "b"): register_forward_hook on the layer keeps its output
pass
mode = OutputMode.Sum
# TODO: Options.outputMode(mode): which results of the loops are kept: the last, or all of them
options.outputMode(mode)
# TODO: Options.deviceIterations: the outer loop: updates per call; in inference, batches
wide = options.deviceIterations(2) if mode else options
# TODO: for_loop: a Python loop: inputs = body(*inputs), count times
if mode:
    pass
elif poptorch.for_loop(2, abs, []):
    pass
# TODO: gradients started at identity_loss, so later computations had no effect on them
loss = (value + 1).sum()
loss *= 2
# TODO: the options come from another file: migrate that file too, and combine both
elsewhere = poptorch.trainingModel(value, value.options)
# TODO: a batch_sampler: pass a sampler of batches for a whole call
loader = poptorch.DataLoader(options, [], batch_sampler=[])
# TODO: max_grad_norm=0.5: torch.nn.utils.clip_grad_norm_(...) before optimizer.step()
optimizer = torch.optim.SGD([], lr=1)
# TODO: ipu_print_tensor: print(tensor), and tensor.register_hook(print) for the gradient
printed = poptorch.ipu_print_tensor(value)
"""


def test_code_that_cannot_be_translated_stays_with_its_meaning(tmp_path: Path) -> None:
    script = tmp_path / "unsure.py"
    script.write_text(UNSURE)
    assert migrated(script, todo=9).read_text().endswith(SURE)


HALF = """
options = poptorch.Options()
model = model.half()
optimizer = poptorch.optim.AdamW(
    model.parameters(), lr=0.01, loss_scaling=128.0, accum_type=torch.float16
)
training_model = poptorch.trainingModel(model, options, optimizer)
x, y = data.tensors
losses = [training_model(x.to(torch.float16), y)[1] for _ in range(20)]
results = poptorch.inferenceModel(model.eval(), options)(x.half()[:4]), losses
"""


@pytest.mark.numeric
def test_a_script_in_half_precision_trains_in_float32_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "half.py"
    script.write_text(HEAD + HALF)
    new = migrated(script, todo=4)

    old, plain = both(script, new, monkeypatch)

    assert "# TODO: float32 replaces half precision" in new.read_text()
    assert all(each.isfinite() for each in plain["losses"])
    rounded = near(8, 20, dtype=torch.float16)
    torch.testing.assert_close(
        plain["results"][1], [each.float() for each in old["losses"]], **rounded
    )


@pytest.mark.larger("test_a_script_in_half_precision_trains_in_float32_and_says_so")
def test_half_precision_from_elsewhere_becomes_float32_when_the_script_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "half.py"
    hidden = HALF.replace("model.half()", "model.to(getattr(torch, 'half'))")
    script.write_text(HEAD + hidden.replace("torch.float16", "getattr(torch, 'half')"))

    plain = runpy.run_path(str(migrated(script, todo=1)))

    assert {each.dtype for each in plain["model"].parameters()} == {torch.float32}
    assert plain["losses"][-1] < plain["losses"][0]


def test_a_script_that_only_predicts_stays_in_half_precision(tmp_path: Path) -> None:
    script = tmp_path / "half.py"
    script.write_text(
        HEAD + "out = poptorch.inferenceModel(model.half().eval())(data[0][0].half())"
    )
    assert runpy.run_path(str(migrated(script)))["out"].dtype is torch.float16


QUERIES = """
import popart
options = poptorch.Options()
schedule = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
options._Popart.set("accumulateOuterFragmentSettings.schedule", int(schedule))
options._Popart.set("groupNormStridedChannelGrouping", True)
training_model = poptorch.trainingModel(model, options)
losses, times = [], []
for x, y in poptorch.DataLoader(options, data, 24):
    losses.append(training_model(x, y)[1])
    times.append(training_model.getLatency())
    low, high, mean = training_model.getPerfCounters()
    if losses:
        print(f"{mean} seconds", training_model.cycleCount())
print(sum(times), "in all")

def latency():
    return training_model.getLatency()

if training_model.isCompiled():
    results = losses, model.state_dict()
"""


def test_queries_of_a_compiled_program_become_comments(tmp_path: Path) -> None:
    script = tmp_path / "queries.py"
    script.write_text(HEAD + QUERIES)
    new = migrated(script, todo=9)

    plain = runpy.run_path(str(new))

    assert len(plain["results"][0]) == 4
    assert plain["latency"]() is None
    code = new.read_text()
    assert "# times.append(training_model.getLatency())" in code
    assert '# print(f"{mean} seconds", training_model.cycleCount())' in code
    assert '# print(sum(times), "in all")' in code
    assert "import popart" not in code


QUERY_OF_A_STEP = """
import poptorch
training_model = poptorch.trainingModel(model, poptorch.Options())
step, names = training_model(x, y), training_model.getTensorNames()
"""


def test_a_line_that_also_trains_is_not_commented_out(tmp_path: Path) -> None:
    script = tmp_path / "queries.py"
    script.write_text(QUERY_OF_A_STEP)

    code = migrated(script, todo=1).read_text()

    line = QUERY_OF_A_STEP.splitlines()[-1]
    assert (
        f"\n# TODO: PoplarExecutor.getTensorNames: there is no compiled program to query\n{line}"
        in code
    )


def test_named_tuples_and_ordered_dictionaries_come_back_as_they_are(tmp_path: Path) -> None:
    script = tmp_path / "kinds.py"
    script.write_text(
        HEAD
        + """
import collections
Pair = collections.namedtuple("Pair", "scores loss")

class Named(Net):
    def forward(self, x, y):
        return Pair(*super().forward(x, y))

class Ordered(Net):
    def forward(self, x, y):
        return collections.OrderedDict(zip(("scores", "loss"), super().forward(x, y)))

options = poptorch.Options().deviceIterations(2)
results = [poptorch.trainingModel(each, options)(*data.tensors) for each in (Named(), Ordered())]
kinds = [type(each) for each in results]
"""
    )
    plain = runpy.run_path(str(migrated(script)))
    assert plain["kinds"] == [plain["Pair"], plain["collections"].OrderedDict]


def test_migrate_prints_a_report_and_a_diff(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nimport poptorch\n" + PLAIN)
    assert main(["migrate", str(script)]) == 0
    shown = capsys.readouterr().out
    counts = "3 become loops, 4 are in torch, 3 are not needed on other devices"
    assert shown.startswith(f"{script}: {counts}\n")
    number = script.read_text().partition("own.Training")[0].count("\n") + 1
    row = f"""
{number:4}  Options.Training.gradientAccumulation  [loop]
      PyTorch: the inner loop: the number of backward() calls before a step(), with the loss divided
               by this number
      here:    Set the number of micro-batches per optimizer step.
"""
    assert row in shown
    assert main(["migrate", "--diff", str(script)]) == 0
    changes = capsys.readouterr().out.splitlines()
    assert "-    own.Training.gradientAccumulation(size)" in changes
    assert "+    own.accumulation = size" in changes
    script.write_text("import torch\n")
    assert main(["migrate", str(script)]) == 0
    assert "uses none of poptorch" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, says",
    [
        (None, "There is no file"),
        (b"\xff\xfe\x00", "is not a text file"),
        (b"import poptorch\nprint 'a'\n", "script.py:2 is not valid Python: print 'a'"),
        (b"import torch\nfrom poptorch import *\n", "script.py:2: replace the star import"),
        (b"import poptorch\nLoops = poptorch.Options().deviceIterations(2)\n", "rename Loops"),
    ],
)
def test_code_that_cannot_be_translated_is_reported_with_its_line(
    text: bytes | None, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    if text is not None:
        script.write_bytes(text)
    assert main(["migrate", "--diff", str(script)]) == 2
    printed = capsys.readouterr()
    assert says in printed.err
    assert not printed.out


def test_without_libcst_the_extra_is_named_and_no_script_is_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", "-o", __file__, __file__]) == 2
    assert "would replace" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "libcst", None)
    assert main(["migrate", __file__]) == 2
    assert 'pip install "poptorch[migrate]"' in capsys.readouterr().err


def test_every_name_has_a_row_or_a_general_one() -> None:
    names = [*poptorch.__all__, *(f"optim.{name}" for name in poptorch.optim.__all__)]
    names += [f"Options.{setting.option}" for setting in settings(poptorch.Options())]
    names += [f"PoplarExecutor.{name}" for name in vars(poptorch.PoplarExecutor) if name[0] != "_"]
    for name in names:
        row = meaning(f"poptorch.{name}")
        assert row is not None, name
        assert row.torch, name
        assert here(f"poptorch.{name.split('(')[0]}"), name
    rows = {each for each in ROWS if named(f"poptorch.{each}") is None}
    assert rows == {"optim.Optimizer.variable_attrs"}  # which only instances have
