"""Show the notebook that fine-tunes BERT to answer questions, with a small model and generated
paragraphs.

python examples/archived/finetuning_bert.py
"""

import torch
import transformers

import popart
import poptorch

LENGTH, LAYERS, ACCUMULATION = 16, 4, 8


class PipelinedBertForQuestionAnswering(transformers.BertForQuestionAnswering):
    """The model with its layers on four IPUs, and one value marked as the loss."""

    def parallelize(self):
        poptorch.BeginBlock(self.bert.embeddings, "Embedding", ipu_id=0)
        for number, layer in enumerate(self.bert.encoder.layer):
            layer.register_forward_hook(
                lambda module, inputs, output: poptorch.recomputationCheckpoint(output)
            )
            poptorch.BeginBlock(layer, f"Encoder{number}", ipu_id=number)
        poptorch.BeginBlock(self.qa_outputs, "QA Outputs", ipu_id=LAYERS - 1)
        return self

    def forward(self, input_ids, attention_mask, start_positions=None, end_positions=None):
        output = super().forward(
            input_ids,
            attention_mask,
            start_positions=start_positions,
            end_positions=end_positions,
        )
        if start_positions is None:
            return output.start_logits, output.end_logits
        return poptorch.identity_loss(output.loss, reduction="none"), output.start_logits


def training_options() -> poptorch.Options:
    """Return all settings of the notebook."""
    options = poptorch.Options().autoRoundNumIPUs(True)
    options.deviceIterations(1).replicationFactor(1).randomSeed(1)
    options.outputMode(poptorch.OutputMode.Final)
    options.Training.gradientAccumulation(ACCUMULATION)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    options.setAvailableMemoryProportion({f"IPU{chip}": 0.4 for chip in range(LAYERS)})
    options.TensorLocations.setOptimizerLocation(
        poptorch.TensorLocationSettings().useOnChipStorage(False).useReplicatedTensorSharding(True)
    )
    options.Precision.setPartialsType(torch.float16)
    options.Precision.enableStochasticRounding(False)
    options._Popart.set("subgraphCopyingStrategy", int(popart.SubgraphCopyingStrategy.JustInTime))
    schedule = popart.AccumulateOuterFragmentSchedule.OverlapMemoryOptimized
    options._Popart.set("accumulateOuterFragmentSettings.schedule", int(schedule))
    options._Popart.set("disableGradAccumulationTensorStreams", True)
    options.connectionType(poptorch.ConnectionType.OnDemand)
    return options


def paragraphs(count: int) -> torch.utils.data.TensorDataset:
    """Return rows of words whose answer is the one word 1."""
    words, places = torch.randint(2, 30, (count, LENGTH)), torch.randint(LENGTH, (count,))
    words[torch.arange(count), places] = 1
    return torch.utils.data.TensorDataset(words, torch.ones_like(words), places, places)


def main() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=LAYERS, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=LENGTH, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = PipelinedBertForQuestionAnswering(config).parallelize().train()
    options = training_options()
    loader = poptorch.DataLoader(options, paragraphs(2048), batch_size=4, shuffle=True)
    optimizer = poptorch.optim.AdamW(
        model.parameters(), lr=0.01, loss_scaling=64.0, accum_type=torch.float32,
        first_order_momentum_accum_type=torch.float32, bias_correction=True,
    )  # fmt: skip
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 4, 2 * len(loader))
    training_model = poptorch.trainingModel(model, options, optimizer)
    losses = []
    for _ in range(2):
        for batch in loader:
            loss, _ = training_model(*batch)
            losses.append(loss.item())
            schedule.step()
            training_model.setOptimizer(optimizer)
    training_model.detachFromDevice()

    words, mask, places, _ = paragraphs(64)[:]
    options = poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    inference_model = poptorch.inferenceModel(model.eval(), options)
    start, end = inference_model(words, mask)
    torch.testing.assert_close((start, end), tuple(each.detach() for each in model(words, mask)))
    share = (start.argmax(1) == places).float().mean().item()
    print(f"loss {losses[0]:.2f} to {losses[-1]:.2f}; {share:.0%} of the answers are right")
    assert losses[-1] < losses[0] / 2


if __name__ == "__main__":
    main()
