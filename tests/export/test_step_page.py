"""Exported pages show all of a program: operators, modules, state and the user's source."""

import linecache
import operator
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple
from xml.etree import ElementTree

import pytest
import torch

import poptorch
from helpers.browser import BROWSER, drawn
from helpers.cases import slow_but_the_first
from helpers.exported_programs import PROGRAMS, export_of
from poptorch._ir.graph import Graph

Element = ElementTree.Element


class Parser(HTMLParser):
    """Makes a tree of a page, in which every element has to be closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._builder, self._open = ElementTree.TreeBuilder(), list[str]()
        self.feed(text)
        assert not self._open, "elements that nothing closes"
        self.page = self._builder.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._builder.start(tag, dict(attrs))
        if tag == "meta":
            self._builder.end(tag)
        else:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        self._builder.end(tag)

    def handle_data(self, data: str) -> None:
        self._builder.data(data)


def shown(element: Element) -> str:
    """Return what a reader sees of an element, in one line."""
    return " ".join("".join(element.itertext()).split())


def hrefs(element: Element) -> list[str]:
    """Return the ids that links in an element lead to."""
    return [each.get("href").removeprefix("#") for each in element.iter("a")]


class Exported(NamedTuple):
    """A program and its page."""

    name: str
    executor: poptorch.PoplarExecutor
    batch: tuple[torch.Tensor, ...]
    text: str
    page: Element

    @property
    def graphs(self) -> list[Graph]:
        return list(self.executor.plan().program.graphs.values())

    @property
    def by_id(self) -> dict[str, Element]:
        return {each.get("id"): each for each in self.page.iter() if each.get("id")}

    @property
    def rows(self) -> dict[str, Element]:
        """Return the rows of operators."""
        return {at: each for at, each in self.by_id.items() if re.fullmatch(r"o\d+", at)}

    @property
    def modules(self) -> list[Element]:
        return [each for each in self.page.iter("details") if each.get("class") == "module"]

    @property
    def tensors(self) -> dict[str, list[Element]]:
        """Return the cells of the rows of state, by key."""
        return {at[2:]: row.findall("td") for at, row in self.by_id.items() if at.startswith("t-")}


def totals_of(module: Element) -> dict[str, float]:
    """Return the numbers of the summary of a module."""
    items = [item for each in module.find("summary").iter("i") for item in each.items()]
    return {what: float(value) for what, value in items}


@pytest.fixture(scope="module", params=slow_but_the_first(PROGRAMS))
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Exported]:
    """Return a program and its page, in a folder that did not exist."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("export") / "new" / "step.html"
    executor, batch = export_of(request.param, file)
    text = file.read_text()
    yield Exported(request.param, executor, batch, text, Parser(text).page)
    executor.destroy()


def test_every_operator_has_a_row(exported: Exported) -> None:
    operators = [node for graph in exported.graphs for node in graph.operators]
    calls = [node.name for node in operators if node.target is not operator.getitem]

    named = [shown(row.find("code")).partition(" = ")[0] for row in exported.rows.values()]

    assert sorted(named) == sorted(calls)


def test_the_numbers_of_a_module_are_the_sums_of_its_parts(exported: Exported) -> None:
    assert exported.modules
    for module in exported.modules:
        totals, inside = totals_of(module), [*module.iter("li")]

        assert totals["data-operators"] == len(inside)
        assert totals["data-flops"] == sum(int(each.get("data-flops")) for each in inside)
        assert totals["data-results"] == sum(int(each.get("data-results")) for each in inside)


def test_the_first_module_is_the_model_with_its_weights_and_its_price(exported: Exported) -> None:
    model = exported.executor.model
    state = [*model.parameters(), *model.buffers()]
    price = exported.executor.estimate(*exported.batch)

    totals = totals_of(exported.modules[0])

    assert totals["data-weights"] == sum(each.nbytes for each in state)
    assert totals["data-cycles"] == pytest.approx(sum(each.cycles for each in price.operators))


def test_the_state_of_the_program_is_shown(exported: Exported) -> None:
    program = exported.executor.plan().program
    views = {view.slot.key for view in program.views()}

    assert exported.tensors.keys() == program.state_slots().keys() | views


def test_state_links_to_the_operators_that_read_it(exported: Exported) -> None:
    """Views of bundled state are read everywhere that the bundle is."""
    program = exported.executor.plan().program
    views = {view.slot.key for view in program.views()}
    inputs = {slot.key for graph in exported.graphs for slot in graph.inputs}

    linked = {key for key, (_, _, read, _) in exported.tensors.items() if hrefs(read)}

    assert linked - views == inputs & exported.tensors.keys() - views


def test_state_links_to_the_operators_that_write_it(exported: Exported) -> None:
    outputs = {slot.key for graph in exported.graphs for slot in graph.outputs}

    linked = {key for key, (_, _, _, written) in exported.tensors.items() if hrefs(written)}

    assert linked == outputs & exported.tensors.keys()


def test_operators_link_to_the_state_that_they_write(exported: Exported) -> None:
    for key, (_, _, _, written) in exported.tensors.items():
        writers = {at for at, row in exported.rows.items() if f"t-{key}" in hrefs(row)}

        assert writers == {*hrefs(written)}, key


def test_all_links_lead_to_a_place_on_the_page(exported: Exported) -> None:
    assert {*hrefs(exported.page)} <= exported.by_id.keys()


def test_the_page_shows_the_source_of_the_users_file(exported: Exported) -> None:
    files = exported.page.findall("body/aside/details")
    assert files
    for part in files:
        lines = linecache.getlines(shown(part.find("summary/small")))

        shown_lines = ["".join(line.itertext()) for line in part.iter("span")]

        assert shown_lines == [f"{at}{line.rstrip()}" for at, line in enumerate(lines, 1)]


def test_lines_that_operators_come_from_link_back_to_them(exported: Exported) -> None:
    used = {at for row in exported.rows.values() for at in hrefs(row) if at.startswith("s")}

    linking = {at for at, each in exported.by_id.items() if re.match(r"s\d", at) and hrefs(each)}

    assert linking == used


def test_a_page_fetches_nothing(exported: Exported) -> None:
    elements = [*exported.page.iter()]

    assert [each for each in elements if each.get("src") or each.get("srcset")] == []
    assert [each for each in elements if not each.get("href", "#").startswith("#")] == []
    assert not re.search(r"url\(|@import", shown(exported.page.find("head/style")))


def test_no_source_becomes_markup(exported: Exported) -> None:
    """The model for inference has a line that is a script, if it is not quoted."""
    assert exported.text.count("<script") == 1
    if exported.name == "inference":
        assert "&lt;/pre&gt;&lt;script&gt;alert(" in exported.text


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


class Seen(NamedTuple):
    """What a browser reports after two clicks, and the page."""

    width: int
    reported: dict[str, str]
    page: Element


@pytest.fixture(scope="module", params=[390, 1280])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Click on the line of a row, and on the first of the rows of that line."""
    if BROWSER is None:
        pytest.skip("chromium draws the page, and is not installed")
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("browser")
    export_of("loops", folder / "step.html")
    text = (folder / "step.html").read_text()
    reported = drawn(text, folder, request.param, CLICKED)
    assert reported["ready"] == "yes"
    return Seen(request.param, reported, Parser(text).page)


@pytest.mark.slow
def test_a_page_is_as_wide_as_the_browser(seen: Seen) -> None:
    assert seen.reported["width"] == str(seen.width)
    assert seen.reported["wide"] == ""


@pytest.mark.slow
def test_a_click_on_a_line_marks_all_of_its_rows(seen: Seen) -> None:
    line = seen.reported["line"]

    rows = [each.get("id") for each in seen.page.iter("li") if line in hrefs(each)]

    assert seen.reported["rows"].split() == rows


@pytest.mark.slow
def test_a_click_on_a_line_opens_the_module_of_its_row(seen: Seen) -> None:
    assert seen.reported["before"] == "false"
    assert seen.reported["after"] == "true"
