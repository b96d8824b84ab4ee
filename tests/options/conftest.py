"""Tests of options see none of the variables of the machine they run on."""

import pytest

from poptorch._base import env


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in env.TABLE:
        if name not in ("POPTORCH_LOG_LEVEL", "POPTORCH_LOG_DEST"):
            monkeypatch.delenv(name, raising=False)
