"""Show the Lightning application that learns letters with a recurrent network, on the text of the
GPL.

python examples/archived/shakespeare_rnn.py
"""

from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn

import poptorch
from poptorch.integrations.lightning import PopTorchStrategy

TEXT = Path("/usr/share/common-licenses/GPL-3")  # from the Debian package base-files
LENGTH, ROWS = 32, 8


class CharRNN(pl.LightningModule):
    """Predicts the next letter."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(letters, 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True)
        self.head = nn.Linear(64, letters)

    def training_step(self, batch, batch_idx):
        text, following = batch
        scores = self.head(self.lstm(self.embedding(text))[0])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), following.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(pl.Callback):
    """Records the loss of each update."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.values.append(float(outputs["loss"]))


def main() -> None:
    pl.seed_everything(0, verbose=False)
    text = TEXT.read_text()[: 64 * ROWS * LENGTH + 1]
    letters = sorted(set(text))
    codes = torch.tensor([letters.index(letter) for letter in text])
    samples = torch.utils.data.TensorDataset(
        codes[:-1].reshape(-1, LENGTH), codes[1:].reshape(-1, LENGTH)
    )
    losses = Losses()
    options = poptorch.Options().showCompilationProgressBar(False)
    trainer = pl.Trainer(
        strategy=PopTorchStrategy(options), accelerator="cpu", max_epochs=1, callbacks=[losses],
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(samples, batch_size=ROWS, shuffle=True)
    trainer.fit(CharRNN(len(letters)), loader)
    print(f"loss {losses.values[0]:.2f} to {losses.values[-1]:.2f} after {len(losses.values)}")
    assert losses.values[-1] < losses.values[0] * 0.8


if __name__ == "__main__":
    main()
