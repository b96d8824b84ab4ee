"""``withoutEffect``, what the log says of it, and the printed overview."""

import inspect

import torch

from poptorch.enums import SyncPattern
from poptorch.options import Options, TensorLocationSettings
from poptorch.options.overview import describe, settings

NO_SETTERS = {
    "anchorMode", "appendToLocationExcludes", "clone", "createOrSet", "defaultAnchorMode",
    "defaultOutputMode", "deleteIfExists", "enablePipelining", "exists", "from_json",
    "loadFromFile", "profile", "set", "toDict", "update", "withoutEffect",
}  # fmt: skip
PRECISION = {"runningStatisticsAlwaysFloat", "runningVarianceAlwaysFloat"}


def test_nothing_is_without_effect_at_first(monkeypatch):
    assert Options().withoutEffect() == []


def test_changed_hints_are_listed():
    options = Options().deviceIterations(4).randomSeed(1).enableStableNorm(True)
    options.syncPattern(SyncPattern.SinglePipeline).setAvailableMemoryProportion({"IPU0": 0.1})
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage(False))
    options.Training.setConvolutionDithering(True)
    options._Popart.set("outlineThreshold", 10.0).set("syntheticDataMode", 0)
    assert options.withoutEffect() == [  # estimates follow the location and the proportion
        "Training.setConvolutionDithering",
        '_Popart.set("outlineThreshold")',
        "enableStableNorm",
        "syncPattern",
    ]
    options.syncPattern(SyncPattern.Full).setAvailableMemoryProportion({})
    options.Precision.setPartialsType(torch.half)  # in the place of the dithering
    assert options.withoutEffect() == ['_Popart.set("outlineThreshold")', "enableStableNorm"]


def test_a_hint_from_the_environment_counts(monkeypatch):
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"syncPattern": "SyncPattern.SinglePipeline"}')
    assert Options().withoutEffect() == ["syncPattern"]


def test_every_setter_is_in_the_table():
    options = Options()
    public = {
        name
        for name, member in inspect.getmembers(Options)
        if not name.startswith("_") and inspect.isfunction(member)
    }
    rows = [setting.option for setting in settings(options)]
    assert public - NO_SETTERS == {name for name in rows if "." not in name}
    for group, others in (("Training", {"accumulationReductionType"}), ("Precision", PRECISION)):
        methods = {
            f"{group}.{name}"
            for name, member in vars(type(getattr(options, group))).items()
            if inspect.isfunction(member) and not name.startswith("_") and name not in others
        }
        assert methods == {name for name in rows if name.startswith(group)}
    assert len(rows) == len(set(rows))


def test_the_overview_shows_values_and_changes():
    text = describe(Options().deviceIterations(4))
    assert "* N deviceIterations = 4" in text
    assert "  N replicationFactor = 1" in text
    assert "  N randomSeed = unset" in text
    assert "  V setExecutionStrategy = PipelinedExecution(AutoStage.SameAsIpu)" in text
    assert "outlineThreshold" not in text
    assert "outlineThreshold" in describe(Options(), every=True)
