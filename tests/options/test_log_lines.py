"""The DEBUG lines of options (spec/options.md section 13)."""

import pytest

from poptorch.enums import OutputMode
from poptorch.options import Options, PipelinedExecution
from poptorch.options.freeze import log_options, prepare


@pytest.fixture
def lines(caplog):
    def collect(options):
        own = prepare(options, training=True)
        for name in ("poptorch:cpp", "poptorch::python"):
            caplog.set_level("DEBUG", logger=name)
        caplog.clear()
        log_options(own)
        return caplog.messages

    return collect


def test_values_and_anchors(lines):
    options = Options().autoRoundNumIPUs().setAvailableMemoryProportion({"IPU1": 0.5})
    options.updatableNamedBuffers(["b1", "b2"]).anchorTensor("short", "long", OutputMode.EveryN, 2)
    found = lines(options)
    for expected in (
        "set auto_round_num_ipus to value true",
        "set available_memory_proportion[1] to 0.5",
        "added b2 to updatableNamedBuffers",
        "set anchored_tensors[short] to long EVERYN/2",
        "set execution_mode to value 0",
    ):
        assert found.count(f"poptorch.Options {expected}") == 1
    assert not any("progress_bar" in line for line in found)


def test_what_decided_device_and_backend_and_advice_on_caching(lines, monkeypatch, tmp_path):
    model = Options().useIpuModel(True)
    assert "From the user configuration: Ipu model: Enabled" in lines(model)
    cached = Options().enableExecutableCaching(str(tmp_path))
    warning = "Executable caching doesn't work with the IPU model: it is switched off"
    assert warning not in lines(cached)
    assert warning in lines(cached.clone().useIpuModel(True))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    own = Options().setExecutionStrategy(PipelinedExecution("a"))
    assert "From POPTORCH_IPU_MODEL environment variable: Ipu model: Enabled" in lines(own)
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")
    line = "From POPTORCH_BACKEND environment variable: reference"
    assert line in lines(Options())
    assert line not in lines(Options().backend("inductor"))
