"""Show the technical note about available memory: one network with several proportions.

python examples/archived/available_memory.py
"""

import torch
from torch import nn

import poptorch


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()
    ).eval()
    images = torch.rand(32, 32, 56, 56)
    expected = model(images).detach()
    peaks = []
    for proportion in (0.05, 0.2, 0.6):
        options = poptorch.Options().deviceIterations(4)
        options.setAvailableMemoryProportion({"IPU0": proportion})
        inference_model = poptorch.inferenceModel(model, options)
        torch.testing.assert_close(inference_model(images), expected)
        estimate = inference_model.estimate(images)
        peaks.append(max(chip.bytes for chip in estimate.chips))
        print(f"{proportion}: {peaks[-1]:,.0f} bytes, {estimate.items_per_second:,.0f} items/s")
        inference_model.destroy()
    assert peaks[0] < peaks[1] < peaks[2]


if __name__ == "__main__":
    main()
