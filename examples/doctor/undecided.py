"""Show a model with everything that a program of fixed shapes does not support.

``poptorch doctor examples/doctor/undecided.py`` lists it all, and what to write instead.
"""

import torch

import poptorch


class Undecided(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x):
        x = self.layer(x)
        if x.mean() > 0:
            x = x - x.mean().item()
        print("after the layer:", x)
        active = x[x > 0]
        return active.sum() / max(1, int((x > 0).sum()))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = poptorch.inferenceModel(Undecided())
    print(model(torch.randn(8, 4)))
