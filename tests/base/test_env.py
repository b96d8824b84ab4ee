"""Variables of the environment: what they mean, and those that mean nothing."""

import pytest

from poptorch._base import env, log
from poptorch._base.errors import Error


@pytest.mark.parametrize(("text", "value"), [
    ("1", True), ("0", False), (" Yes", True), ("off", False), ("2", True), ("", None),
])  # fmt: skip
def test_flags(text, value, monkeypatch):
    monkeypatch.setenv("POPTORCH_IPU_MODEL", text)
    assert env.get("POPTORCH_IPU_MODEL") is value


@pytest.mark.parametrize(
    ("name", "text"), [("POPTORCH_WAIT_FOR_IPU", "maybe"), ("OMPI_COMM_WORLD_SIZE", "two")]
)
def test_what_cannot_be_understood_is_an_error_that_names_the_variable(name, text, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(ValueError, match=f"{name} cannot be understood") as caught:
        env.get(name)
    assert isinstance(caught.value, Error)
    assert text in str(caught.value)


def test_a_misspelt_variable_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("POPTORCH_BACKENDS", "reference")
    log.setup()
    lines = [record.getMessage() for record in caplog.records]
    assert any("POPTORCH_BACKENDS has no effect" in x and "POPTORCH_BACKEND?" in x for x in lines)
