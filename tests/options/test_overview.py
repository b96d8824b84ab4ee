"""``withoutEffect``, and the printed overview."""

from poptorch.enums import SyncPattern
from poptorch.options import Options, TensorLocationSettings
from poptorch.options.overview import describe


def test_changed_hints_are_listed(monkeypatch) -> None:
    options = Options()
    assert options.withoutEffect() == []
    options.deviceIterations(4).enableStableNorm(True).syncPattern(SyncPattern.SinglePipeline)
    options.setAvailableMemoryProportion({"IPU0": 0.1})
    options.TensorLocations.setWeightLocation(TensorLocationSettings().useOnChipStorage(False))
    options.Training.setConvolutionDithering(True)
    options._Popart.set("outlineThreshold", 10.0).set("syntheticDataMode", 0)
    assert options.withoutEffect() == [  # estimates follow the location and the proportion
        "Training.setConvolutionDithering",
        '_Popart.set("outlineThreshold")',
        "enableStableNorm",
        "syncPattern",
    ]
    options.syncPattern(SyncPattern.Full).Training.setConvolutionDithering(False)
    options._Popart.set("convolutionOptions", {})
    assert options.withoutEffect() == ['_Popart.set("outlineThreshold")', "enableStableNorm"]
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", '{"syncPattern": "SyncPattern.SinglePipeline"}')
    assert Options().withoutEffect() == ["syncPattern"]


def test_the_overview_shows_values_and_changes() -> None:
    text = describe(Options().deviceIterations(4))
    assert "* N deviceIterations = 4" in text
    assert "  N replicationFactor = 1" in text
    assert "  N randomSeed = unset" in text
    assert "  V setExecutionStrategy = PipelinedExecution(AutoStage.SameAsIpu)" in text
    assert "outlineThreshold" not in text
    assert "outlineThreshold" in describe(Options(), every=True)
