"""Our ``Trainer`` against that of transformers: same losses, same files; models with caches."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
    TrainingArguments,
)

import poptorch
from helpers.closeness import near, relative
from helpers.wrapping import compilations, options, runs_compiled
from poptorch.integrations.transformers import Trainer

pytestmark = pytest.mark.slow
PLAIN = transformers.Trainer
Samples = list[dict[str, Any]]
RATE = 1e-2
NOISE = 0.1 * RATE
SAVING = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "no"}


def bert(dropout: float = 0.0, count: int = 8, layers: int = 0) -> tuple[torch.nn.Module, Samples]:
    """The fewer layers, the sooner it is captured."""
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config), [_sentence(index) for index in range(count)]


def _sentence(index: int) -> dict[str, Any]:
    draw, mask = torch.Generator().manual_seed(index), (torch.arange(8) < 3 + index % 6).long()
    tokens = torch.randint(1, 50, (8,), generator=draw) * mask
    return {"input_ids": tokens, "attention_mask": mask, "labels": torch.tensor(index % 2)}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": RATE,
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "save_strategy": "no",
        "eval_strategy": "epoch",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(str(folder), **{**settings, **changes})


def made(kind: type, case: Any, args: TrainingArguments, **keywords: Any) -> Any:
    torch.manual_seed(1)
    model, samples = case
    if issubclass(kind, Trainer):
        own = poptorch.Options().backend("reference").showCompilationProgressBar(False)
        keywords = {"options": own, **keywords}
    trainer = kind(model, args, train_dataset=samples, eval_dataset=samples, **keywords)
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def history(trainer: Any, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def assert_alike(ours: Any, plain: Any) -> None:
    for key in ("loss", "grad_norm", "eval_loss", "learning_rate"):
        assert history(plain, key)
        assert history(ours, key) == pytest.approx(history(plain, key), rel=relative(16, 5)), key
    weights = ours.model.state_dict(), plain.model.state_dict()
    # Adam makes steps of its rate from gradients that are nothing but rounding, as of keys' biases.
    torch.testing.assert_close(*weights, rtol=0, atol=NOISE)


def trained(
    case: Any, folder: Path, kinds: Any = (Trainer, PLAIN), changes: Any = None, **keywords: Any
) -> list[Any]:
    """Train with both, from the same weights; return both after comparing them."""
    both = []
    for kind in kinds:
        torch.manual_seed(0)
        both.append(made(kind, case(), arguments(folder, **(changes or {})), **keywords))
        both[-1].train()
    assert_alike(*both)
    return both


@pytest.mark.parametrize("count, steps", [(10, 1), (16, 3), (10, 2), (14, 2), (18, 3)])
def test_losses_are_those_of_the_plain_trainer(count: int, steps: int, tmp_path: Path) -> None:
    """The last micro-batch of an epoch is short; or the last of two updates has one only."""
    changes = {"gradient_accumulation_steps": steps}
    ours, plain = trained(lambda: bert(count=count, layers=1), tmp_path, changes=changes)
    moments, expected = ours.optimizer.state_dict()["state"], plain.optimizer.state_dict()["state"]
    assert moments.keys() == expected.keys()
    for index, values in expected.items():
        assert float(moments[index]["step"]) == float(values["step"])
        torch.testing.assert_close(moments[index]["exp_avg"], values["exp_avg"], **near(16, 5))


def test_a_usual_run_logs_no_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = arguments(tmp_path, num_train_epochs=1)

    with caplog.at_level(logging.WARNING, "poptorch"):
        made(Trainer, bert(), args).train()

    assert [record.getMessage() for record in caplog.records] == []


def test_label_smoothing_and_metrics_and_predictions(tmp_path: Path) -> None:
    def metrics(seen: Any) -> dict[str, float]:
        return {"right": float((seen.predictions.argmax(-1) == seen.label_ids).mean())}

    changes = {"label_smoothing_factor": 0.2}
    ours, plain = trained(bert, tmp_path, changes=changes, compute_metrics=metrics)
    assert history(ours, "eval_right") == history(plain, "eval_right")
    mine, theirs = (trainer.predict(trainer.eval_dataset) for trainer in (ours, plain))
    assert mine.predictions == pytest.approx(theirs.predictions, abs=NOISE)
    assert mine.label_ids.tolist() == theirs.label_ids.tolist()


class Notes(transformers.TrainerCallback):
    """Records what callbacks receive, and stops the training."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.logs: list[dict[str, float]] = []
        self.metrics: list[dict[str, float]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        control.should_training_stop = state.global_step >= 5

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
        timing = ("runtime", "second", "flos", "epoch")
        self.logs.append({k: v for k, v in logs.items() if not any(word in k for word in timing)})

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        self.metrics.append(metrics)


@pytest.mark.larger("test_label_smoothing_and_metrics_and_predictions")
def test_callbacks_and_metrics_of_inputs_losses_and_chosen_outputs(tmp_path: Path) -> None:
    """The last batch to evaluate is short; logits are reduced before they are gathered."""

    def metrics(seen: transformers.EvalPrediction) -> dict[str, float]:
        assert seen.inputs.shape[0] == seen.losses.shape[0] == seen.predictions.shape[0] == 10
        right = (seen.predictions == seen.label_ids).mean()
        return {"right": right, "tokens": seen.inputs.sum(), "mean": seen.losses.mean()}

    changes = {"include_for_metrics": ["inputs", "loss"], "num_train_epochs": 3}
    args, notes = arguments(tmp_path, **changes), []
    for kind in (Trainer, PLAIN):
        torch.manual_seed(0)
        trainer = made(
            kind,
            bert(count=10, layers=1),
            args,
            compute_metrics=metrics,
            preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
        )
        notes.append(Notes())
        trainer.add_callback(notes[-1])
        trainer.train()
    mine, plain = notes
    assert mine.steps == plain.steps == [1, 2, 3, 4, 5]
    assert len(plain.metrics) == 2
    for one, another in zip(mine.logs, plain.logs, strict=True):
        assert one == pytest.approx(another, rel=relative(16, 5))


class Weighted(Trainer):
    """A loss of the user's own."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        labels, outputs = inputs.pop("labels"), model(**inputs)
        weight = torch.tensor([1.0, 3.0])
        loss = torch.nn.functional.cross_entropy(outputs["logits"], labels, weight=weight)
        return (loss, outputs) if return_outputs else loss


class PlainWeighted(PLAIN):
    compute_loss = Weighted.compute_loss


@pytest.mark.larger("test_losses_are_those_of_the_plain_trainer")
def test_a_user_defined_loss_trains_as_in_the_plain_trainer(tmp_path: Path) -> None:
    trained(bert, tmp_path, (Weighted, PlainWeighted))


def test_a_resumed_run_continues_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    """The model has dropout, whose random numbers continue, too."""
    torch.manual_seed(0)
    whole = made(Trainer, bert(0.3), arguments(tmp_path / "a", **SAVING))
    whole.train()
    torch.manual_seed(5)  # other weights
    resumed = made(Trainer, bert(0.3), arguments(tmp_path / "b", **SAVING))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert len(history(whole, "loss")) == 4
    assert history(resumed, "loss") == history(whole, "loss")
    weights = resumed.model.state_dict(), whole.model.state_dict()
    torch.testing.assert_close(*weights, rtol=0, atol=0)


@pytest.mark.parametrize("first, second", [(Trainer, PLAIN), (PLAIN, Trainer)])
def test_checkpoints_go_from_one_trainer_to_the_other(
    first: type, second: type, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    whole = made(first, bert(), arguments(tmp_path / "a", **SAVING))
    whole.train()
    torch.manual_seed(5)
    resumed = made(second, bert(), arguments(tmp_path / "b", **SAVING))
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-3"))
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), rel=relative(16, 5))
    restored = BertForSequenceClassification.from_pretrained(tmp_path / "a" / "checkpoint-4")
    torch.testing.assert_close(restored.classifier.weight, whole.model.classifier.weight)


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    settings = {"save_strategy": "epoch", "load_best_model_at_end": True, "learning_rate": 0.3}
    torch.manual_seed(0)
    trainer = made(Trainer, bert(), arguments(tmp_path, **settings))
    trainer.train()
    losses = history(trainer, "eval_loss")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=relative(8))
    assert min(losses) != losses[-1]


def several_lengths() -> tuple[torch.nn.Module, Samples]:
    model, samples = bert(layers=1)
    for sample in samples:
        count = int(sample["attention_mask"].sum())
        for key in ("input_ids", "attention_mask"):
            sample[key] = sample[key][:count]
    return model, samples


def sorted_by_length() -> tuple[torch.nn.Module, Samples]:
    model, samples = several_lengths()
    return model, sorted(samples, key=lambda sample: len(sample["input_ids"]))


def to_the_longest(samples: Samples) -> dict[str, torch.Tensor]:
    """Pad a batch as the collators of transformers do."""
    batch = {
        key: torch.nn.utils.rnn.pad_sequence([each[key] for each in samples], batch_first=True)
        for key in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.stack([each["labels"] for each in samples])}


@pytest.mark.larger("test_losses_are_those_of_the_plain_trainer")
@pytest.mark.parametrize("steps", [1, 2])
def test_batches_of_several_lengths_train_as_with_the_plain_trainer(
    steps: int, tmp_path: Path
) -> None:
    """Also if they belong to one update."""
    changes = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 2}

    trained(several_lengths, tmp_path, changes=changes, data_collator=to_the_longest)


class Counting(transformers.TrainerCallback):
    """Notes how many programs there are after each evaluation."""

    def __init__(self, compiled: list[int]) -> None:
        self.compiled, self.counts = compiled, list[int]()

    def on_evaluate(self, *args: Any, **keywords: Any) -> None:
        self.counts.append(len(self.compiled))


@pytest.mark.larger("test_one_program_for_all_lengths_trains_and_one_evaluates")
@pytest.mark.parametrize("steps", [1, 2])
def test_nothing_is_compiled_after_the_first_epoch(steps: int, tmp_path: Path) -> None:
    changes = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": 2}
    args = arguments(tmp_path, num_train_epochs=4, **changes)
    with compilations() as compiled:
        counting = Counting(compiled)
        ours = made(
            Trainer, several_lengths(), args, data_collator=to_the_longest, callbacks=[counting]
        )
        ours.train()

    assert len(counting.counts) == 4
    assert counting.counts[0] == counting.counts[-1]


@pytest.fixture(scope="module")
def compiled_epochs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, list[int]]:
    """Three epochs of 40 lengths with compiled code, and of the plain Trainer.

    Returns both trainers, and how many programs ours had compiled after each epoch.
    """
    folder, both = tmp_path_factory.mktemp("epochs"), list[Any]()
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\n")
    collator = transformers.DataCollatorWithPadding(
        transformers.BertTokenizerFast(vocab_file=str(vocabulary))
    )
    settings = {"per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}
    args = arguments(folder, num_train_epochs=3, **settings)
    with compilations() as compiled:
        counting = Counting(compiled)
        for kind, changes in (
            (Trainer, {"options": options("inductor"), "callbacks": [counting]}),
            (PLAIN, {}),
        ):
            torch.manual_seed(0)
            both.append(made(kind, of_forty_lengths(), args, data_collator=collator, **changes))
            both[-1].train()
    return both[0], both[1], counting.counts


def of_forty_lengths() -> tuple[torch.nn.Module, Samples]:
    config = BertConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=50,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    draw = torch.Generator().manual_seed(0)
    samples = []
    for index in range(300):
        length = int(torch.randint(17, 57, (), generator=draw))
        tokens = torch.randint(5, 50, (length,), generator=draw).tolist()
        samples.append({"input_ids": tokens, "attention_mask": [1] * length, "labels": index % 2})
    return BertForSequenceClassification(config), samples


@pytest.mark.full("compiles four programs, and trains 114 steps twice")
@pytest.mark.parametrize("key", ["loss", "eval_loss"])
def test_compiled_code_trains_and_evaluates_all_lengths_as_the_plain_trainer(
    key: str, compiled_epochs: tuple[Any, Any, list[int]]
) -> None:
    ours, plain, _ = compiled_epochs

    assert len(history(plain, key)) == {"loss": 114, "eval_loss": 3}[key]
    assert history(ours, key) == pytest.approx(history(plain, key), rel=relative(32, 5))


@pytest.mark.full("shares the runs of the test above")
def test_compiled_code_is_complete_after_the_first_of_three_epochs(
    compiled_epochs: tuple[Any, Any, list[int]],
) -> None:
    ours, _, counts = compiled_epochs

    assert counts == [counts[0]] * 3
    assert runs_compiled(ours._training)


def test_one_program_for_all_lengths_trains_and_one_evaluates(tmp_path: Path) -> None:
    """Each has one more, for the length that it meets first."""
    args = arguments(tmp_path, per_device_train_batch_size=2, per_device_eval_batch_size=3)
    with compilations() as compiled:
        made(Trainer, several_lengths(), args, data_collator=to_the_longest).train()

    assert len(compiled) <= 4


def test_predictions_of_tokens_are_those_of_the_plain_trainer(tmp_path: Path) -> None:
    """Batches are padded for the program; what is returned has the length that they had."""

    def tokens_case() -> tuple[torch.nn.Module, Samples]:
        _, samples = several_lengths()
        config = BertConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            vocab_size=50,
        )
        return transformers.BertForTokenClassification(config), samples

    args = arguments(tmp_path, per_device_eval_batch_size=3)
    torch.manual_seed(0)
    model, samples = tokens_case()
    unlabelled = [{k: v for k, v in each.items() if k != "labels"} for each in samples]

    def collate(rows: Samples) -> dict[str, torch.Tensor]:
        batch = to_the_longest([{**row, "labels": torch.tensor(0)} for row in rows])
        del batch["labels"]
        return batch

    mine, theirs = (
        made(kind, (model, unlabelled), args, data_collator=collate).predict(unlabelled)
        for kind in (Trainer, PLAIN)
    )

    assert mine.predictions.shape == theirs.predictions.shape
    assert mine.predictions == pytest.approx(theirs.predictions, abs=relative(16, 5))


class Gated(torch.nn.Module):
    """The mean over all tokens behind a gate that is closed at first, as adapters have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 2)
        self.gate = torch.nn.Parameter(torch.zeros(2))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        logits = self.embedding(input_ids).mean(1)
        return {"loss": (logits * self.gate).sum(), "logits": logits}


def test_padding_that_changes_gradients_is_noticed_where_the_loss_does_not_show_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, samples = several_lengths()
    args = arguments(tmp_path, num_train_epochs=1, eval_strategy="no")

    with caplog.at_level(logging.WARNING, "poptorch"):
        made(Trainer, (Gated(), samples), args, data_collator=to_the_longest).train()

    assert "batches keep their lengths" in caplog.text


@pytest.mark.larger("test_no_samples_are_left_out")
def test_sizes_that_the_user_chose_are_kept(tmp_path: Path) -> None:
    collate = poptorch.PadToSizes([4, 8], {"input_ids": 0, "attention_mask": 0})
    changes = {"train_sampling_strategy": "sequential"}

    ours, _ = trained(sorted_by_length, tmp_path, changes=changes, data_collator=collate)

    programs = ours._training._session.programs.all
    lengths = {shape[1] for each in programs for shape in each.inputs.shapes if len(shape) == 2}
    assert lengths <= {4, 8}
    assert not ours._lengths  # the Trainer chose none itself


def test_no_samples_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The last micro-batch of 10 samples is short; predictions and losses are of all of them."""
    args = arguments(tmp_path, gradient_accumulation_steps=2, eval_strategy="no")
    with caplog.at_level(logging.WARNING, "poptorch"):
        trainer = made(Trainer, bert(count=10), args)
        trainer.train()
    assert not caplog.records
    expected = PLAIN(trainer.model, args, eval_dataset=trainer.eval_dataset)
    assert len(trainer.predict(trainer.eval_dataset).predictions) == 10
    got = trainer.evaluate()["eval_loss"]
    assert got == pytest.approx(expected.evaluate()["eval_loss"], rel=relative(16, 5))
    assert not args.dataloader_drop_last


def test_torch_compile_device_iterations_and_differing_lengths_are_refused(tmp_path: Path) -> None:
    with pytest.raises(poptorch.Error, match="torch_compile cannot be combined with poptorch"):
        made(Trainer, bert(), arguments(tmp_path, torch_compile=True))
    with pytest.raises(ValueError, match="deviceIterations must be set in the TrainingArguments"):
        made(Trainer, bert(), arguments(tmp_path), options=poptorch.Options().deviceIterations(2))
    model, samples = bert()
    for sample in samples[:4]:
        for key in ("input_ids", "attention_mask"):
            sample[key] = sample[key][:4]
    args = arguments(tmp_path, gradient_accumulation_steps=2, train_sampling_strategy="sequential")
    trainer = made(Trainer, (model, samples), args, pad_lengths=False)
    with pytest.raises(poptorch.Error, match=r"input_ids: \(4, 4\), \(4, 8\)"):
        trainer.train()


SIZES = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}


def tokens(*sizes: int) -> torch.Tensor:
    return torch.randint(1, 20, sizes)


GPT2 = {
    "vocab_size": 50,
    "n_positions": 64,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def test_a_model_returns_its_cache_and_takes_it_back() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options().programs(2))
    first, then = tokens(2, 5), tokens(2, 1)
    with torch.no_grad():
        expected = model(then, past_key_values=model(first).past_key_values)
    got = ours(first)
    assert type(got.past_key_values) is transformers.DynamicCache
    assert got.past_key_values.get_seq_length() == 5
    end = ours(then, past_key_values=got.past_key_values)
    assert got.past_key_values.get_seq_length() == 5
    assert end.past_key_values.get_seq_length() == 6
    torch.testing.assert_close(end.logits, expected.logits)


def test_a_cache_that_grows_by_each_token_is_compiled_at_most_three_times() -> None:
    model = GPT2LMHeadModel(GPT2Config(**GPT2)).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options().programs(3))
    ids, cache, given = tokens(1, 1), None, None
    with compilations() as compiled, torch.no_grad():
        for _ in range(32):
            result = ours(ids, past_key_values=cache) if cache is not None else ours(ids)
            expected = model(ids, past_key_values=given)
            cache, given = result.past_key_values, expected.past_key_values
            torch.testing.assert_close(result.logits, expected.logits)
            ids = result.logits.argmax(-1)

    assert cache.get_seq_length() == 32
    assert len(compiled) <= 3


@pytest.mark.larger("test_a_cache_that_grows_by_each_token_is_compiled_at_most_three_times")
def test_compiled_code_serves_a_cache_that_grows_from_1_to_128_tokens() -> None:
    model = GPT2LMHeadModel(GPT2Config(**{**GPT2, "n_positions": 128})).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options("inductor").programs(3))
    ids, cache, given = tokens(1, 1), None, None
    with compilations() as compiled, torch.no_grad():
        for _ in range(128):
            result = ours(ids, past_key_values=cache) if cache is not None else ours(ids)
            expected = model(ids, past_key_values=given)
            cache, given = result.past_key_values, expected.past_key_values
            torch.testing.assert_close(result.logits, expected.logits)
            ids = result.logits.argmax(-1)

    assert cache.get_seq_length() == 128
    assert len(compiled) <= 3
    assert runs_compiled(ours)


@pytest.mark.larger("test_a_cache_that_grows_by_each_token_is_compiled_at_most_three_times")
def test_a_static_cache_needs_one_program_for_all_steps() -> None:
    config = LlamaConfig(**SIZES)
    model = LlamaForCausalLM(config).eval()
    ours = poptorch.inferenceModel(copy.deepcopy(model), options().programs(2))
    given = StaticCache(config=config, max_cache_len=8)
    cache = StaticCache(config=config, max_cache_len=8)
    with torch.no_grad():
        for ids in (tokens(1, 3), *(tokens(1, 1) for _ in range(3))):
            expected = model(ids, past_key_values=given).logits
            result = ours(ids, past_key_values=cache)
            cache = result.past_key_values
            torch.testing.assert_close(result.logits, expected)
    assert int(cache.get_seq_length()) == 6


def test_decorators_that_add_arguments_see_a_call_as_it_was() -> None:
    model, ids = transformers.LlamaModel(LlamaConfig(**SIZES)).eval(), tokens(2, 4)
    got = poptorch.inferenceModel(model, options())(input_ids=ids)
    torch.testing.assert_close(got.last_hidden_state, model(ids).last_hidden_state)


@pytest.mark.larger("test_losses_are_those_of_the_plain_trainer")
def test_a_mixture_of_experts_trains() -> None:
    config = transformers.MixtralConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1)
    model = transformers.MixtralForCausalLM(config)
    eager_model = copy.deepcopy(model)
    plain = torch.optim.SGD(eager_model.parameters(), lr=0.1)
    ours = poptorch.trainingModel(model, options(), torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        ids = tokens(2, 4)
        plain.zero_grad()
        expected = eager_model(ids, labels=ids).loss
        expected.backward()
        plain.step()
        torch.testing.assert_close(ours(input_ids=ids, labels=ids).loss, expected.detach())
    torch.testing.assert_close(model.state_dict(), eager_model.state_dict())
