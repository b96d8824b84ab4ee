"""``withoutEffect``, and the printed overview."""

from poptorch.enums import SyncPattern
from poptorch.options import Options, TensorLocationSettings


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
