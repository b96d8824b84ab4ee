"""The technical note about available memory: one network, several proportions.

python examples/archived/available_memory.py
"""

import torch
from torch import nn

import poptorch


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 28 * 28, 10),
    ).eval()  # fmt: skip
    images = torch.rand(16, 3, 32, 32)
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
    assert peaks == sorted(peaks)


if __name__ == "__main__":
    main()
