"""A step's page: a row for each operator, sums of modules, state as the program's, the source."""

import linecache
import operator
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import poptorch
from helpers.browser import BROWSER, drawn
from helpers.wrapping import Graded, options
from helpers.zoo import ZOO

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


class Looped(nn.Module):
    def forward(self, x):
        return poptorch.for_loop(3, lambda y: y * 2, [x])[0]  # </pre><script>alert("&")</script>


def deep(options: poptorch.Options):
    """Twenty small weights, which are bundled."""
    layers = (nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9))
    model = Graded(both=True, layers=nn.Sequential(*layers), last=nn.Linear(4, 2))
    return model, options, (torch.ones(16, 4), torch.ones(16, 2))


def pipeline():
    model = Graded(both=True, first=nn.Linear(4, 4), second=nn.Linear(4, 2))
    poptorch.BeginBlock(model.second, "second", ipu_id=1)
    return model, options(accumulation=8), (torch.ones(16, 4), torch.ones(16, 2))


def of_zoo(name: str):
    return ZOO[name].build(), options(accumulation=2), ZOO[name].inputs(8)


CASES = {
    "lanes": lambda: deep(options(accumulation=4, iterations=2)),
    "loops": lambda: deep(options(accumulation=4, iterations=2).lanes(1)),
    "pipeline": pipeline,
    "inference": lambda: (Looped(), options(iterations=2), (torch.ones(4, 2),)),
    **{name: lambda name=name: of_zoo(name) for name in ("conv_batchnorm", "lstm", "tied")},
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
