"""Our packages for other people's packages are imported with these, and never before."""

from __future__ import annotations

import sys
import types

import pytest

from poptorch._base import companions


def test_a_companion_comes_when_its_package_is_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(companions, "COMPANIONS", {"others": "ours_for_others"})
    companions.bring()
    assert caplog.text == ""
    monkeypatch.setitem(sys.modules, "others", types.ModuleType("others"))
    for _ in range(2):
        companions.bring()
    assert caplog.text.count("ours_for_others cannot be used: No module named") == 1
    monkeypatch.setitem(sys.modules, "ours_for_others", types.ModuleType("ours_for_others"))
    companions.bring()
    assert caplog.text.count("cannot be used") == 1
