"""Train on FashionMNIST in a job: poprun --num-instances 2 python processes.py. Without poprun it
is one process.

The batch size is that of all processes together. With --checkpoints, a job that was stopped, or
that poprun --max-restarts starts again, continues where it stopped.
"""

import torch
from torch import nn

import popdist
import popdist.poptorch
import poptorch
from common import TEST_BATCH, dataset, parser
from poptorch_ipu import ClassificationModel, ModelWithLoss


def accuracy(model, test):
    """Return the accuracy on the test images, without waiting for other processes."""
    options = poptorch.Options()
    options.Distributed.disable()  # this process reads all of them
    loader = poptorch.DataLoader(options, test, batch_size=TEST_BATCH)
    inference_model = poptorch.inferenceModel(model.eval(), options)
    correct = 0
    for images, labels in loader:
        correct += (inference_model(images).argmax(dim=1) == labels).sum().item()
    return correct / (len(loader) * TEST_BATCH)


def main():
    arguments = parser(__doc__)
    arguments.add_argument("--checkpoints", help="folder for them (default: none are made)")
    arguments.add_argument("--every", type=int, default=500, help="steps between two of them")
    args = arguments.parse_args()
    torch.manual_seed(args.seed)
    data = dataset(args)

    options = popdist.poptorch.Options() if popdist.isPopdistEnvSet() else poptorch.Options()
    options.randomSeed(args.seed)
    parts = options.Distributed.numProcesses * options.replication_factor
    loader = poptorch.DataLoader(
        options, data.train, batch_size=args.batch_size // parts, shuffle=True
    )
    model = ModelWithLoss(ClassificationModel(), nn.NLLLoss())
    optimizer = poptorch.optim.SGD(model.parameters(), lr=args.lr, momentum=args.momentum)
    training_model = poptorch.trainingModel(model, options, optimizer)

    checkpoints = poptorch.Checkpoints(args.checkpoints or "unused", training_model, loader)
    if args.checkpoints and checkpoints.resume():
        print(f"Going on after step {checkpoints.step}")
    for images, labels in checkpoints.batches(args.epochs):
        _, loss = training_model(images, labels)
        if args.checkpoints and checkpoints.step % args.every == 0:
            checkpoints.save()
    if popdist.getInstanceIndex() == 0:
        print(f"{checkpoints.step} steps, last loss {loss.mean().item():.4f}")
        print(f"Test accuracy: {accuracy(model, data.test):.2%} of {len(data.test)} images")
    training_model.destroy()


if __name__ == "__main__":
    main()
