"""What an exported file and its page say, from Python and the command; what cannot be exported."""

import inspect
import linecache
import operator
import re
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch

import poptorch
from helpers.browser import BROWSER, drawn
from helpers.exported import loaded
from helpers.wrapping import Graded, Regression, options
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
    """Return the results of one run; add its gradients up."""
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
    """Change the weights by their gradients."""
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
    assert capsys.readouterr().out == f"wrote {file}, and what it works on beside it\n"
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
    for words, said in ((), "-o step.py"), (("--html", "step.htm"), "step.htm, which ends in .htm"):
        assert main(["export", *words, str(script)]) == 2  # before the script runs
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_torch_compiles_an_exported_step(tmp_path, monkeypatch) -> None:
    model, file = Regression(), tmp_path / "step.py"
    executor = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), 0.1))
    batch = torch.randn(4, 4), torch.randn(4, 2)
    executor.compile(*batch)
    executor.export(file)
    module = loaded(file)
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


def exported(name: str, file):
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
    executor, batch = exported(name, file)
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
    exported("loops", tmp_path / "step.html")
    text = (tmp_path / "step.html").read_text()
    seen = drawn(text, tmp_path, width, CLICKED)
    assert (seen["ready"], seen["width"], seen["wide"]) == ("yes", str(width), "")
    assert (seen["before"], seen["after"]) == ("false", "true")
    assert seen["rows"].split() == [
        each.get("id") for each in Parser(text).page.iter("li") if seen["line"] in hrefs(each)
    ]
