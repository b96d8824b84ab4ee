"""Exported files: what they and their pages say, and that they give the interpreter's bits."""

import copy
import inspect
import itertools
import linecache
import multiprocessing
import operator
import re
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import poptorch
import poptorch_ipu
from helpers import beside, exported
from helpers.browser import BROWSER, drawn
from helpers.source_tree import ROOT
from helpers.wrapping import Graded, Having, Regression, options
from helpers.zoo import ZOO
from poptorch._cli.main import main

SCRIPT = """
import torch, poptorch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, labels):
        out = self.fc2(torch.relu(self.fc1(x)))
        return out, nn.functional.cross_entropy(out, labels)

def train():
    torch.manual_seed(0)
    model = Net()
    options = poptorch.Options().showCompilationProgressBar(False).backend("reference")
    options.Training.gradientAccumulation(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    training = poptorch.trainingModel(model, options.lanes(1), optimizer)
    training(torch.ones(8, 4), torch.tensor([0, 1] * 4))
    print("ran on")

if __name__ == "__main__":
    train()
"""
FUNCTIONS = '''\
def forward_backward(p, acc, x, labels):
    """Return the results of one run; accumulate its gradients."""
    g = {}  # gradients
    relu = torch.relu(F.linear(x, p["fc1.weight"], p["fc1.bias"]))  # net.py:11
    output = F.linear(relu, p["fc2.weight"], p["fc2.bias"])
    log_softmax = torch.log_softmax(output, 1)  # net.py:12
    loss, nll_loss_weight = aten.nll_loss_forward(log_softmax, labels, None, 1, -100)

    # Backward.
    d_nll_loss = aten.nll_loss_backward(
        torch.ones_like(loss), log_softmax, labels, None, 1, -100, nll_loss_weight
    )
    d_log_softmax = aten._log_softmax_backward_data(d_nll_loss, log_softmax, 1, torch.float32)
    g["fc2.weight"] = d_log_softmax.t() @ relu  # net.py:11
    g["fc2.bias"] = torch.sum(d_log_softmax, [0], True).reshape(2)
    d_threshold = aten.threshold_backward(d_log_softmax @ p["fc2.weight"], relu, 0)
    g["fc1.weight"] = d_threshold.t() @ x
    g["fc1.bias"] = torch.sum(d_threshold, [0], True).reshape(8)
    for name in WEIGHTS:
        acc[name] += g[name]
    return output, loss


def update(p, acc, h):
    """Update the weights with their gradients."""
    negative = -h["lr"]
    for name in WEIGHTS:
        scaled = acc[name] * 0.5
        acc[name].zero_()
        p[name].copy_(torch.addcmul(p[name], scaled, negative))


@torch.no_grad()
def step(p, acc, h, x, labels):
    """Make one call."""
    x = x.unflatten(0, (2, -1))
    labels = labels.unflatten(0, (2, -1))
    for a in range(2):
        output, loss = forward_backward(p, acc, x[a], labels[a])
    update(p, acc, h)
    return output, loss
'''


@pytest.mark.parametrize("place", ["", ":train"])
def test_the_command_writes_what_a_script_would_run(place: str, tmp_path, capsys) -> None:
    script, file = tmp_path / "net.py", tmp_path / "step.py"
    script.write_text(SCRIPT)
    assert main(["export", "-o", str(file), f"{script}{place}"]) == 0
    assert capsys.readouterr().out == f"wrote {file}, and its weights and settings next to it\n"
    assert FUNCTIONS in file.read_text()
    page = file.with_suffix(".html")
    assert main(["export", f"{script}{place}", "--html", str(page)]) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert "<title>Net: its step</title>" in page.read_text()
    run = [sys.executable, str(file)]
    shown = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert shown.startswith("loss tensor(0.")
    wrong = {
        "there.py": "There is no file there.py",
        f"{script}:test": f"{script} has no function test",
        __file__: f"{__file__} used no wrapped model",
    }
    for words, said in wrong.items():
        assert main(["export", "-o", "step.py", words]) == 2
        assert capsys.readouterr().err == f"{said}\n"
    for words, said in (
        ((), "-o step.py"),
        (("--html", "step.htm"), "step.htm: its suffix is '.htm'"),
    ):
        assert main(["export", *words, str(script)]) == 2  # before the script runs
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_torch_compiles_an_exported_step(tmp_path, monkeypatch) -> None:
    model, file = Regression(), tmp_path / "step.py"
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.randn(4, 4), torch.randn(4, 2)
    executor.compile(*batch)
    executor.export(file)
    module = exported.loaded(file)
    monkeypatch.setitem(sys.modules, "step", module)  # where torch's compiler looks for it
    (eager, _), (compiled, _) = (module.load(file.with_suffix(".safetensors")) for _ in range(2))
    step = torch.compile(module.step)
    for _ in range(3):
        torch.testing.assert_close(step(*compiled, *batch), module.step(*eager, *batch))
    torch.testing.assert_close(compiled, eager)


class Told(torch.nn.Module):
    def forward(self, x):
        return poptorch.ipu_print_tensor(x) + 1


class Looped(torch.nn.Module):
    def forward(self, x):
        return poptorch.for_loop(3, lambda y: y * 2, [x])[0]  # </pre><script>alert("&")</script>


@pytest.mark.parametrize("model, operator", [(Told, "print_tensor"), (Looped, "while_loop")])
def test_what_is_not_torchs_is_refused(model: type, operator: str, tmp_path) -> None:
    executor = poptorch.inferenceModel(model(), options())
    with pytest.raises(poptorch.Error, match="has not been compiled"):
        executor.export(tmp_path / "step.py")
    executor.compile(torch.ones(2))
    with pytest.raises(poptorch.Error, match=operator) as refused:
        executor.export(tmp_path / "step.py")
    assert " ".join(inspect.getsource(model).splitlines()[-1].split()) in refused.value.message
    assert not list(tmp_path.iterdir())


Element = ElementTree.Element


class Parser(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._builder, self._open = ElementTree.TreeBuilder(), list[str]()
        self.feed(text)
        assert not self._open
        self.page = self._builder.close()

    def handle_starttag(self, tag, attrs):
        self._builder.start(tag, dict(attrs))
        if tag == "meta":
            self._builder.end(tag)
        else:
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag
        self._builder.end(tag)

    def handle_data(self, data):
        self._builder.data(data)


def shown(element: Element) -> str:
    return " ".join("".join(element.itertext()).split())


def hrefs(element: Element) -> list[str]:
    return [each.get("href").removeprefix("#") for each in element.iter("a")]


def deep(options: poptorch.Options):
    """Twenty small weights, which are bundled."""
    layers = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(9))
    model = Graded(both=True, layers=torch.nn.Sequential(*layers), last=torch.nn.Linear(4, 2))
    return model, options, (torch.ones(16, 4), torch.ones(16, 2))


def pipeline():
    model = Graded(both=True, first=torch.nn.Linear(4, 4), second=torch.nn.Linear(4, 2))
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    return model, options(accumulation=8), (torch.ones(16, 4), torch.ones(16, 2))


CASES = {
    "lanes": lambda: deep(options(accumulation=4, iterations=2)),
    "loops": lambda: deep(options(accumulation=4, iterations=2).lanes(1)),
    "pipeline": pipeline,
    "inference": lambda: (Looped(), options(iterations=2), (torch.ones(4, 2),)),
    **{
        name: lambda name=name: (ZOO[name].build(), options(accumulation=2), ZOO[name].inputs(8))
        for name in ("conv_batchnorm", "lstm", "tied")
    },
}


def export_of(name: str, file):
    model, opts, batch = CASES[name]()
    if name == "inference":
        executor = poptorch.inferenceModel(model, opts)
    else:
        executor = poptorch.trainingModel(model, opts, torch.optim.AdamW(model.parameters()))
    executor.compile(*batch)
    executor.export(file)
    return executor, batch


@pytest.mark.parametrize("name", CASES)
def test_a_page_has_all_of_a_program(name: str, tmp_path) -> None:
    file = tmp_path / "new" / "step.html"
    executor, batch = export_of(name, file)
    program, text = executor.plan().program, file.read_text()
    page = Parser(text).page
    ids = {each.get("id"): each for each in page.iter() if each.get("id")}
    graphs = program.graphs.values()
    # Every operator has a row.
    rows = {at: each for at, each in ids.items() if re.fullmatch(r"o\d+", at)}
    codes = {at: shown(row.find("code")) for at, row in rows.items()}
    calls = [n for g in graphs for n in g.operators if n.target is not operator.getitem]
    named = sorted(code.partition(" = ")[0] for code in codes.values())
    assert named == sorted(node.name for node in calls)
    # What a module says is the sum of what is in it; all together is the model, and its price.
    whole: dict[str, float] = {}
    for module in (each for each in page.iter("details") if each.get("class") == "module"):
        items = [item for each in module.find("summary").iter("i") for item in each.items()]
        said, inside = {what: float(value) for what, value in items}, [*module.iter("li")]
        whole = whole or said
        assert said["data-operators"] == len(inside)
        for what in ("data-flops", "data-results"):
            assert said[what] == sum(int(each.get(what)) for each in inside)
    state = [*executor.model.parameters(), *executor.model.buffers()]
    assert whole["data-weights"] == sum(each.nbytes for each in state)
    price = executor.estimate(*batch)
    assert whole["data-cycles"] == pytest.approx(sum(each.cycles for each in price.operators))
    # State is the program's, and what reads and writes it says so.
    views = {view.slot.key: view for view in program.views()}
    tensors = {at[2:]: each.findall("td") for at, each in ids.items() if at.startswith("t-")}
    assert tensors.keys() == program.state_slots().keys() | views.keys()
    for key, (_, _, read, written) in tensors.items():
        assert (
            bool(hrefs(read)) == any(s.key == key for g in graphs for s in g.inputs) or key in views
        )
        assert bool(hrefs(written)) == any(s.key == key for g in graphs for s in g.outputs)
        assert {at for at, row in rows.items() if f"t-{key}" in hrefs(row)} == {*hrefs(written)}

    # Lines are those of the user's file, which stands beside; all links lead somewhere here.
    assert {*hrefs(page)} <= ids.keys()
    for part in page.findall("body/aside/details"):
        lines = linecache.getlines(shown(part.find("summary/small")))
        beside = ["".join(line.itertext()) for line in part.iter("span")]
        assert beside == [f"{at}{line.rstrip()}" for at, line in enumerate(lines, 1)]
    used = {at for row in rows.values() for at in hrefs(row) if at.startswith("s")}
    assert used == {at for at, each in ids.items() if re.match(r"s\d", at) and hrefs(each)}
    # Nothing is fetched, and no source becomes markup.
    assert not any(each.get("src") or each.get("srcset") for each in page.iter())
    assert all(each.get("href", "#").startswith("#") for each in page.iter())
    assert not re.search(r"url\(|@import", shown(page.find("head/style")))
    assert text.count("<script") == 1
    assert name != "inference" or "&lt;/pre&gt;&lt;script&gt;alert(" in text


CLICKED = """
const link = document.querySelector(".module .module li .at"), shut = link.closest("li");
link.click();
const line = document.querySelector(".on");
const before = shut.checkVisibility();
line.querySelector("a").click();
Object.assign(parent.document.body.dataset, {
  line: line.id, before, after: shut.checkVisibility(),
  rows: [...document.querySelectorAll(".on")].map(each => each.id).join(" "),
});"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="chromium draws the page, and is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_goes_from_rows_to_lines_and_back(width: int, tmp_path) -> None:
    export_of("loops", tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    seen = drawn(text, tmp_path, width, CLICKED)
    assert seen["ready"] == "yes"
    assert seen["width"] == str(width)
    assert seen["wide"] == ""
    assert seen["before"] == "false"
    assert seen["after"] == "true"
    assert seen["rows"].split() == [
        each.get("id") for each in Parser(text).page.iter("li") if seen["line"] in hrefs(each)
    ]


ours, torchs, Made = poptorch.optim, torch.optim, tuple[nn.Module, Any, Any, list[Any]]


@pytest.fixture(scope="module")
def elsewhere():
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), exported.alone) as pool:
        yield pool


def small(dtype: torch.dtype = torch.float32) -> nn.Module:
    layers = {"first": nn.Linear(6, 5), "tanh": nn.Tanh(), "second": nn.Linear(5, 3)}
    return Graded(both=True, **layers).to(dtype)


def rows(count: int, calls: int = 10, dtype: torch.dtype = torch.float32) -> list[Any]:
    draw = lambda size: torch.randn(count, size).to(dtype)  # noqa: E731
    return [(draw(6), draw(3)) for _ in range(calls)]


OPTIMIZERS = {
    "SGD": lambda p: ours.SGD(p, 0.05),
    "momentum": lambda p: ours.SGD(p, 0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "combined": lambda p: ours.SGD(p, 0.05, momentum=0.9, use_combined_accum=True),
    "maximized": lambda p: torchs.SGD(p, 0.05, momentum=0.9, maximize=True),
    "Adam": lambda p: ours.Adam(p, 0.01, weight_decay=0.1),
    "AdamW": lambda p: ours.AdamW(p, 0.01, bias_correction=False),
    "clipped": lambda p: ours.AdamW(p, 0.01, max_grad_norm=0.1),
    "RMSprop": lambda p: ours.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "LAMB": lambda p: ours.LAMB(p, 0.01, weight_decay=0.01),
    "groups": lambda p: torchs.SGD([{"params": w, "lr": 0.1 / (at + 1)} for at, w in enumerate(p)]),
    "scaled": lambda p: ours.Adam(p, 0.01, loss_scaling=64.0),
    **{
        f"torch's {name}": lambda p, kind=kind, numbers=numbers: getattr(torchs, kind)(p, **numbers)
        for name, (kind, numbers) in beside.OPTIMIZERS.items()
    },
}
LOOPS = {
    "one": options,
    "iterations": lambda: options(iterations=4),
    "accumulation": lambda: options(accumulation=4),
    "lanes": lambda: options(accumulation=2, replicas=2, iterations=2),
    "chunks": lambda: options(accumulation=4, iterations=2).lanes(2),
    "one by one": lambda: options(accumulation=2, iterations=2).lanes(1),
    "replicas": lambda: options(replicas=2, accumulation=2, iterations=2).lanes(1),
}


def optimizer(name: str, dtype: torch.dtype = torch.float32) -> Made:
    opts = options(accumulation=2, iterations=2)
    return small(dtype), opts, OPTIMIZERS[name], rows(16, dtype=dtype)


def results(loop: str, mode: str) -> Made:
    period = 2 if mode == "EveryN" and "iter" in loop else 1
    opts = LOOPS[loop]().outputMode(poptorch.OutputMode[mode], period)
    return small(), opts, OPTIMIZERS["SGD"], rows(32, 3)


def inference(lanes: int, mode: str) -> Made:
    opts = options(iterations=4, replicas=1 if lanes == 2 else 2).lanes(lanes)
    return small(), opts.outputMode(poptorch.OutputMode[mode]), None, rows(32, 3)


def model(name: str, loop: str) -> Made:
    """Batch norm with its statistics, dropout, LSTM, embeddings, tied weights."""
    opts = LOOPS[loop]().randomSeed(7).broadcastBuffers(False)
    return ZOO[name].build(), opts, OPTIMIZERS["Adam"], [ZOO[name].inputs(32) for _ in range(10)]


def bert(layers: int, dropout: float) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        vocab_size=512,
        intermediate_size=128,
        max_position_embeddings=24,
        num_labels=4,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    whole = transformers.BertForSequenceClassification(config)
    return Having(lambda m, ids, labels: m.bert(input_ids=ids, labels=labels).loss, bert=whole)


def drawing() -> nn.Module:
    """Layers that are written once, and draw."""
    kinds = nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1), nn.GELU()
    layers = (copy.deepcopy(kind) for _ in range(8) for kind in kinds)
    whole = nn.Sequential(*(nn.Sequential(*itertools.islice(layers, 10)) for _ in range(4)))
    return Having(lambda m, x, y: nn.functional.mse_loss(m.whole(x), y), whole=whole)


def script(name: str) -> Any:
    return exported.loaded(ROOT / "examples" / name / "train.py")


# By name: the model, its micro-batches, and what makes a batch.
EXAMPLES = {
    "fashion_mnist": (
        lambda: poptorch_ipu.ModelWithLoss(poptorch_ipu.ClassificationModel(), nn.NLLLoss()), 1,
        lambda: (torch.randn(16, 1, 28, 28), torch.randint(10, (16,)))),
    **{f"bert{n}": (lambda n=n, p=p: bert(n, p), 2,
                    lambda: (torch.randint(512, (16, 24)), torch.randint(4, (16,))))
       for n, p in ((2, 0.0), (12, 0.1))},
    "pipeline": (lambda: script("pipeline").Net(70), 8,
                 lambda: (torch.randint(70, (32, 32)), torch.randint(70, (32,)))),
    "series": (lambda: script("series").Forecast(), 4,
               lambda: (torch.randn(48, 24, 1), torch.randn(48))),
    "drawing": (drawing, 2, lambda: (torch.randn(8, 16), torch.randn(8, 16))),
}  # fmt: skip


def example(name: str) -> Made:
    make, accumulation, batch = EXAMPLES[name]
    batches = [[*batch()] for _ in range(10)]
    return make(), options(accumulation=accumulation), OPTIMIZERS["torch's adamw"], batches


BITS = {
    **{name: (optimizer, name) for name in OPTIMIZERS},
    **{f"{n}, {m}": (results, n, m) for n in LOOPS for m in ("Final", "All", "EveryN", "Sum")},
    **{f"{n} lanes, {m}": (inference, n, m) for n in (1, 2, 4) for m in ("Final", "All", "Sum")},
    **{f"{n}, {m}": (model, n, m) for n in ZOO for m in ("one", "lanes", "replicas", "chunks")},
    **{str(t): (optimizer, "scaled", t) for t in (torch.float16, torch.bfloat16)},
    **{n: (example, n) for n in EXAMPLES},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BITS)
def test_results_and_weights(name: str, elsewhere: ProcessPoolExecutor, tmp_path) -> None:
    torch.manual_seed(0)
    make, *words = BITS[name]
    model, opts, optimizer, batches = make(*words)
    if optimizer is None:
        executor = poptorch.inferenceModel(model, opts)
    else:
        executor = poptorch.trainingModel(model, opts, optimizer(model.parameters()))
    file = tmp_path / "step.py"
    executor.compile(*batches[0])
    executor.export(file)
    exported.check_style(file)
    torch.save(batches, file.with_suffix(".batches"))
    expected = [executor(*batch) for batch in batches]
    elsewhere.submit(exported.run, file).result()
    results, state = torch.load(file.with_suffix(".out"))
    torch.testing.assert_close(results, expected, rtol=0, atol=0, equal_nan=True)
    trained = {k: v for k, v in executor.model.state_dict().items() if k in state}
    assert trained
    for key, value in trained.items():  # the module has the first replica's buffers
        state[key] = state[key] if state[key].shape == value.shape else state[key][0]
    torch.testing.assert_close({k: state[k] for k in trained}, trained, rtol=0, atol=0)
    text = file.read_text()
    assert len(text.splitlines()) < 500
    assert name != "bert12" or text.count("layer_forward(") == text.count("layer_backward(") == 13
