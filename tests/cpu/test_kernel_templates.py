"""Templates of kernels in torch's compiler are parsed when they are used."""

from collections.abc import Iterator
from unittest import mock

import jinja2
import pytest
from torch._inductor.codegen.common import KernelTemplate

from poptorch._cpu.kernel_templates import parsed_when_used

SOURCE = "{{ name }} takes {% for each in numbers %}{{ each }}, {% endfor %}"


@pytest.fixture
def parse() -> Iterator[mock.Mock]:
    """The function that parses templates."""
    from_string = jinja2.Environment.from_string
    with mock.patch.object(
        jinja2.Environment, "from_string", autospec=True, side_effect=from_string
    ) as watched:
        yield watched


def test_a_template_is_parsed_once_and_when_it_is_used(parse: mock.Mock) -> None:
    with parsed_when_used():
        template = KernelTemplate._template_from_string(SOURCE)
    before = parse.call_count

    texts = [template.render(name="it", numbers=[1, 2]) for _ in range(2)]

    assert before == 0
    assert parse.call_count == 1
    assert texts == [jinja2.Template(SOURCE).render(name="it", numbers=[1, 2])] * 2


def test_an_object_of_a_template_finds_the_function_as_torchs_code_calls_it() -> None:
    with parsed_when_used():
        template = KernelTemplate("of a test")._template_from_string(SOURCE)
    assert template.render(name="it", numbers=[]) == "it takes "


def test_templates_are_parsed_immediately_afterwards(parse: mock.Mock) -> None:
    with parsed_when_used():
        pass
    template = KernelTemplate("of a test")._template_from_string(SOURCE)
    assert parse.call_count == 1
    assert isinstance(template, jinja2.Template)


def test_a_template_is_false_if_it_cannot_be_parsed_without_a_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch._inductor.codegen.common.jinja2_env", lambda: None)
    with parsed_when_used():
        template = KernelTemplate._template_from_string(SOURCE)
    assert not template
