"""Each row of docs/differences.md is shown by a test: the table below says which, and has the rest."""
# ruff: noqa: E501 (cells of the page)

import pytest
import torch

import popdist
import poptorch
from helpers.closeness import near, relative
from helpers.source_tree import ROOT
from helpers.wrapping import EagerPair, Having

PAGE = ROOT / "docs" / "differences.md"
SHOWN = {
    "needs IPUs, or the SDK's simulator": "test_wheel.py::test_the_readme_trains_where_nothing_else_is_installed",
    "compiles before the first result": "compile/test_tiers.py::test_compiled_code_takes_over_with_all_state_and_random_numbers",
    "a missing toolchain is an error": "compile/test_bad_machines.py::test_the_warning_names_the_missing_tool",
    "enables `faulthandler` and replaces `sys.excepthook` at import": "test_runtime.py::test_importing_changes_one_variable_of_the_environment",
    "saved models are pickles, and loading one runs any code in it": "session/files/test_files.py::test_pickles_in_untrusted_files_are_not_loaded",
    "a loaded executable runs exactly as it was saved": "session/files/test_files.py::test_hyper_parameters_come_from_a_file_from_before_any_run",
    "the arguments of a saved model are pickled": "session/files/test_files.py::test_arguments_of_plain_types_are_saved_and_loaded",
    "`save` fails for a model that cannot be pickled": "session/files/test_files.py::test_a_model_that_cannot_be_pickled_is_left_out_with_a_warning",
    "an executable is found by an undocumented key, and the cache grows without limit": "compile/test_cache.py::test_a_program_that_differs_in_nothing_that_is_compiled_is_a_hit",
    "hyper-parameters that change while detached are uploaded at the next attach, errors included": "optim/test_replacing.py::test_after_a_refused_optimizer_training_continues_unchanged",
    "loading recorded the first batch in the file": "session/files/test_files.py::test_a_saved_file_has_the_default_name_and_no_values_of_inputs",
    "random numbers come from the device": "session/test_random_state.py::test_the_hosts_seed_does_not_matter_to_a_program_with_a_seed",
    "SGD with dampening also dampened the first step": "update/test_algorithms.py::test_each_optimizer_equals_its_plain_form_in_float64",
    "a dampening without momentum scaled every gradient": "update/test_algorithms.py::test_updates_equal_those_computed_by_hand",
    "`maximize=True` was accepted and ignored": "update/test_algorithms.py::test_each_optimizer_equals_its_plain_form_in_float64",
    "lists of `betas` failed an assertion": "optim/test_classes.py::test_betas_may_be_a_list_as_in_configuration_files",
    "a velocity was always stored multiplied by the loss scale": "conformance/test_differences.py::test_a_new_loss_scale_leaves_the_velocity_that_of_the_gradients",
    "half-precision products could accumulate in half precision (`setPartialsType`)": "capture/test_casting.py::test_products_of_half_tensors_are_computed_in_float",
    "stochastic rounding applied to every half-precision result": "session/optimizer/test_loss_scaling.py::test_only_conversions_of_float32_to_half_are_rounded_at_random",
    "a floating-point exception made the model unusable": "backends/test_checked.py::test_the_error_names_operator_module_line_and_micro_batch",
    "`int64` inside `forward` was `int32`": "session/calls/test_outputs.py::test_an_integer_beyond_32_bits_is_refused",
    "bfloat16 inputs were refused": "capture/test_casting.py::test_bfloat16_is_a_type_like_half",
    "`poptorch.autocast` was removed in 3.x": "ops/test_autocast.py::test_products_run_in_half_unless_autocast_is_switched_off",
    '`state_dict()["state"]` of PyTorch\'s optimizers stayed empty': "session/optimizer/test_optimizers.py::test_state_equals_that_of_eager_and_a_resumed_run_continues_with_it",
    "`train()` and `eval()` had an effect at the first call only": "session/weights/test_common_weights.py::test_training_and_validating_follow_the_mode",
    "training models with common modules, such as the two of a GAN, each trained their own copy until you copied the weights": "session/weights/test_common_weights.py::test_models_train_as_in_plain_torch",
    "`model.weight = tensor` on a module that is wrapped for training was ignored": "session/weights/test_sync.py::test_assigned_values_reach_the_device",
    "GELU was approximated, regardless of the argument": "capture/test_torch_features.py::test_gelus_softmax_of_large_numbers_and_lstms_are_torchs",
    "`AdamW(bias_correction=False)` still corrected the bias": "update/test_algorithms.py::test_each_optimizer_equals_its_plain_form_in_float64",
    "`for_loop` outside a wrapper ran its body once; `custom_op` and the CTC decoder returned zeros": "ops/test_control.py::test_nested_loops_compute_the_results_of_python_loops",
    "plug-in operators of domain `ai.graphcore` needed their compiled library": "ops/test_known_custom_ops.py::test_values_and_gradients_are_those_of_the_formula",
    "values computed from a loss did not change the training; six of PyTorch's losses were not found": "capture/test_losses.py::test_training_follows_the_returned_scalar_that_is_made_of_all_losses",
    "an argument of unknown type was a constant, including its tensors": "session/calls/test_containers.py::test_an_argument_with_tensors_that_nobody_finds_is_refused",
    "`identity_loss` of a loss was not supported, nor its gradient outside a wrapper": "capture/test_losses.py::test_inner_losses_keep_their_reduction_and_may_be_returned",
    "an unused layer in a block, or a `BeginBlock` on a later layer that was called before one on an earlier layer, was an error": "place/test_placing.py::test_a_warning_names_a_block_whose_results_nothing_reads",
    "the `backward` of an `autograd.Function` and hooks on gradients were ignored": "capture/test_gradients.py::test_gradients_of_ones_own_are_honoured",
    "`self.buffer = tensor` in `forward` was an error": "lanes/test_models.py::test_a_model_in_lanes_computes_the_same_as_eager_pytorch",
    "a Python branch on values was an error": "capture/test_value_reads.py::test_a_branch_is_frozen_to_the_path_of_the_first_inputs",
    "in-place changes of slices with a step were an error": "capture/test_in_place.py::test_changed_inputs_are_seen_by_the_caller_and_by_the_next_call",
    "batch norms with `momentum=None` could not be compiled": "lanes/test_models.py::test_a_model_in_lanes_computes_the_same_as_eager_pytorch",
    "many operators were missing or limited": "sweep/test_sweep.py::test_every_operator_computes_the_same_as_eager_torch",
    "`Options.loadFromFile` executed the file as Python": "options/test_files.py::test_only_calls_with_plain_arguments_are_understood",
    "a count of 0 was accepted by `deviceIterations`, `replicationFactor`, `gradientAccumulation`": "options/test_container.py::test_a_mistake_is_refused_at_its_line_with_the_correct_call",
    "`print(executor)` printed the layers of the model": "conformance/test_differences.py::test_an_executor_shows_where_its_weights_are",
    "`repr(options)` contained every setting": "options/test_rules.py::test_the_text_of_options_lists_changes_in_the_order_of_the_table",
    "`anchorTensor` could still be called on frozen options": "options/test_settings.py::test_frozen_options_refuse_changes_and_draw_nothing",
    "the processes of a job trained with the weights that each of them had": "job/test_training.py::test_processes_that_differ_stop_with_an_error_that_says_in_what",
    "replicated tensor sharding also divided weights, and worked over the replicas of one process": "job/test_training.py::test_four_processes_train_as_one",
    "jobs used MPI, Horovod or the fabric": "cli/test_poprun.py::test_instances_on_each_host_know_their_index",
    "`popdist.getDeviceId()` returned an id": "conformance/test_differences.py::test_popdist_has_no_device_id",
    "graph layers that add or remove edges, and pooling that selects nodes, were refused": "geometric/test_static.py::test_pooling_chooses_the_same_nodes_and_fills_up_with_minus_one",
    "batches of graphs dropped strings, trimmed seeds, and contained padding edges that point behind the last node": "geometric/test_collate.py::test_trimming_nodes_keeps_one_of_each_sample",
    "options of the hardware had an effect": "options/test_settings.py::test_an_option_without_effect_is_named_once",
    "profile reports contained measurements of the hardware, in their own format": "session/reports/test_profile_reports.py::test_the_estimate_stays_the_same_and_is_that_of_the_method",
    "`cycleCount()` was read from the hardware": "session/reports/test_profile_reports.py::test_cycles_are_counted_where_no_report_can_be_written",
    "the guide of 2.x gives `INFO` as the default level of the log": "test_runtime.py::test_log_levels_are_names_or_numbers_and_others_are_refused",
    "`sourceLocationExcludes` replaced three default entries": "options/test_settings.py::test_excluded_files_are_not_the_users",
    "an error in the data set ended the loading process": "test_dataloader_faults.py::test_a_later_error_arrives_in_its_place_and_the_loader_can_be_used_again",
    "Ctrl-C also reached the loading process": "test_dataloader_faults.py::test_a_program_that_survives_ctrl_c_continues_to_load_and_ends_with_the_next_one",
    "the last asynchronous element had the size of the others": "test_accessor.py::test_later_elements_take_keys_types_and_shapes_of_the_first_one",
    "two loops over one asynchronous loader received elements alternately": "test_dataloader.py::test_a_newer_iterator_over_the_same_loading_process_ends_the_older_one",
    "`len` counted the micro-batches of a batch sampler": "test_dataloader.py::test_drop_last_decides_about_incomplete_groups_of_a_batch_sampler",
    'a string such as "no" counted as a true `shuffle` or `drop_last`; arguments of another mode had no effect, nor did a stream that is too short': "test_dataloader.py::test_impossible_arguments_of_a_loader_are_refused",
    "lists and tuples of strings were taken from the last of the joined micro-batches": "test_dataloader.py::test_texts_in_lists_are_joined_and_otherwise_the_last_one_counts",
    "the `__iter__` of a subclass ran in the loading process and again outside": "test_dataloader.py::test_subclasses_of_the_loader_can_have_mix_ins",
    "the loading process polled at a fixed interval": "data/test_producer.py::test_pauses_get_longer_until_a_message_ends_them",
    "mixed types in a layer are an error": "capture/test_casting.py::test_results_of_layers_have_the_type_of_the_inputs_or_what_was_chosen",
    "mixed half-precision and float operands become float, or are refused": "capture/test_casting.py::test_mixed_operands_get_one_type",
    "recurrent layers need inputs and weights of one type": "capture/test_casting.py::test_results_of_layers_have_the_type_of_the_inputs_or_what_was_chosen",
    "labels are `int64`": "capture/test_casting.py::test_small_integers_half_buffers_and_32_bit_labels_behave_as_in_torch",
    "64-bit results stay 64-bit": "capture/test_casting.py::test_64_bit_types_come_back_as_32_bit",
    "gradients of several backward calls add up": "update/test_algorithms.py::test_eight_micro_batches_of_four_equal_one_of_32",
    "`DataLoader(drop_last=False)` is the default": "test_dataloader.py::test_every_mode_yields_the_same_again_and_again",
    "a loss is a number": "session/calls/test_outputs.py::test_results_have_the_shape_and_the_contents_of_their_output_mode",
    "an argument that `forward` changes in place may share memory with another one": "session/calls/test_arguments.py::test_an_input_that_forward_changes_may_not_share_memory_with_another_one",
    "Python in `forward` runs at every call": "capture/test_explain.py::test_python_in_forward_and_hooks_runs_at_capture_only",
    "a replaced or parametrized layer, another `forward`, number format, `requires_grad` or block takes effect at the next call": "session/test_host_changes.py::test_one_message_lists_all_changes_once",
    "hooks that you add later to optimizers, parameters, layers or all modules take effect": "session/test_host_changes.py::test_a_warning_names_hooks_that_an_optimizer_gets_later",
    "a tensor that `forward` stores in an attribute can be read": "conformance/test_differences.py::test_stored_tensors_hold_no_values",
    "weights and buffers that you change are used in the next step": "session/test_host_changes.py::test_one_message_lists_all_changes_once",
    "Adam counts the steps of each weight": "optim/test_state.py::test_a_weight_that_has_made_fewer_steps_than_others_is_named",
    "gradients can be read, and clipped, between two steps": "session/test_host_changes.py::test_clipping_on_the_host_causes_one_warning",
    "changing a hyper-parameter takes effect": "session/test_host_changes.py::test_one_warning_names_a_number_that_needs_set_optimizer",
    "a slice beyond the end is shorter": "ops/test_slicing.py::test_the_start_of_a_slice_is_read_at_run_time",
    "exceptions are PyTorch's": "session/test_errors.py::test_exceptions_of_a_model_stay_the_users_own",
    "Adam changes the bias of the keys of an attention layer": "conformance/test_differences.py::test_noise_moves_the_bias_of_keys",
    "errors have four parts: what happened, the values, your own source line, and what to do": "session/test_whole_calls.py::test_tensors_that_no_program_can_read_are_refused",
    "`poptorch doctor` and `executor.explain` list everything that cannot be captured, with its line": "capture/test_explain.py::test_the_error_of_a_compilation_names_all_that_is_unsupported",
    "`print(executor.plan())` shows what a call runs": "test_runtime.py::test_a_notebook_shows_a_plan_as_a_picture",
    "micro-batches and replicas run side by side; `Options.lanes` and `laneMemory` set how many": "conformance/test_zoo.py::test_training_equals_the_eager_loop",
    "the first call returns immediately, and compiled code takes over later": "compile/test_tiers.py::test_compiled_code_takes_over_with_all_state_and_random_numbers",
    "a batch with fewer rows than the first one, such as the last one of an epoch, [gets its own program](guide/data.md#a-short-last-batch). `options.programs(1)` makes it an error, as in PopTorch, where all shapes must be constant": "session/calls/test_short_batches.py::test_an_epoch_with_a_short_last_batch_trains_like_eager",
    "`options.programs(n)` keeps up to n compiled programs that share the same weights, one for each combination of input shapes and types": "session/weights/test_common_weights.py::test_a_short_last_batch_trains_like_eager",
    "one program serves all sizes of a dimension, from the second size on, with any number of micro-batches per call. One warning says so, unless `options.programs(n)` allows at least two programs; `options.programs(1)` makes another size an error, as in PopTorch": "session/calls/test_varying_sizes.py::test_training_serves_all_sizes_with_the_numbers_of_eager_torch",
    "`poptorch.estimate` [predicts the cost of a model on IPUs](guide/ipu_costs.md)": "estimates/test_estimating.py::test_a_model_does_not_fit_if_its_fullest_tile_does_not",
    "[`transformers.Trainer`](guide/transformers.md) and [Lightning](guide/lightning.md) train through compiled steps": "integrations/test_transformers.py::test_losses_are_those_of_the_plain_trainer",
    "if a program computed something else than PyTorch, you were not warned": "eager/test_micro_batch_check.py::test_a_difference_is_one_warning_if_asked_for",
    "`view` of a tensor that is not contiguous is an error": "capture/test_inner_gradients.py::test_a_tensor_in_another_order_is_viewed_as_on_an_ipu",
    "if all IPUs are in use, attaching raises an exception": "test_pod.py::test_a_shared_pod_whose_devices_are_all_in_use_is_an_error_that_names_the_holder",
    "a buffer in half precision is rounded after every micro-batch": "lanes/test_half.py::test_running_values_are_as_close_to_the_exact_values_as_those_of_eager",
    'a scheduler that is created after wrapping causes the warning "Ignoring unexpected group attribute"': "optim/test_replacing.py::test_schedulers_of_torch_that_are_created_after_wrapping_cause_no_warning",
    "inference computed no gradients": "capture/test_inner_gradients.py::test_inference_computes_gradients_as_eager_torch_does",
    "an error of more than 80 lines was written to `poptorch_error.log` in the working directory": "base/test_long_messages.py::test_a_long_message_overwrites_nothing_in_the_working_directory",
    "a backend is chosen by an option or by `POPTORCH_BACKEND`, and others can be added": "conformance/test_zoo.py::test_the_environment_chooses_a_backend_unless_an_option_does",
}
# The suite was run by hand on the releases that CONTRIBUTING.md names.
BY_HAND = {"needs one exact version of torch"}
X, Y = torch.randn(8, 4), torch.randint(3, (8,))


def test_every_row_is_shown_by_a_test() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    cells = {row.split(" | ")[0].removeprefix("| ") for row in rows}
    assert cells - {"PopTorch", "torch", "here"} == SHOWN.keys() | BY_HAND
    for place in SHOWN.values():
        path, name = place.split("::")
        assert f"def {name}(" in (ROOT / "tests" / path).read_text(), place
    for row in rows:
        assert len(row.split(" | ")) == 2


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_BACKEND", "reference")


def net() -> Having:
    linear = torch.nn.Linear(4, 3)
    return Having(lambda m, x, y: torch.nn.functional.cross_entropy(m.linear(x), y), linear=linear)


def test_a_new_loss_scale_leaves_the_velocity_that_of_the_gradients() -> None:
    """Eagerly, where there is no loss scale, a velocity is that of the gradients."""
    pair = EagerPair(
        net(),
        lambda p: poptorch.optim.SGD(p, lr=0.1, momentum=0.9, loss_scaling=2.0),
        **near(20, 2, size=0.2),
    )
    pair.step(X, Y)
    pair.ours.loss_scaling = 64.0
    pair.wrapped.setOptimizer(pair.ours)
    pair.step(X, Y)
    torch.testing.assert_close(pair.model.state_dict(), pair.eager.state_dict(), **pair.close)


def test_an_executor_shows_where_its_weights_are() -> None:
    training = poptorch.trainingModel(net())
    assert str(training) == "PoplarExecutor: Having, training, not compiled"
    training(X, Y)
    assert "device: attached, its weights are newer" in str(training)
    assert "(linear): Linear" not in str(training)
    assert "(linear): Linear" in repr(training)
    training.copyWeightsToHost()
    assert "device: attached\n" in str(training)


def test_popdist_has_no_device_id() -> None:
    assert popdist.getDeviceId() is None


def test_stored_tensors_hold_no_values() -> None:
    def storing(model: Having, x: torch.Tensor) -> torch.Tensor:
        model.hidden = x + 1
        return model.hidden

    model = Having(storing)
    poptorch.inferenceModel(model)(X)
    with pytest.raises(Exception):  # noqa: B017
        model.hidden.tolist()


def attends(model: Having, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out, _ = model.attention(x, x, x, need_weights=False)
    return out, torch.nn.functional.mse_loss(out, y)


def test_noise_moves_the_bias_of_keys() -> None:
    x, y = torch.randn(4, 6, 8), torch.randn(4, 6, 8)
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    pair = EagerPair(Having(attends, attention=attention), torch.optim.Adam)
    trained, native = pair.model, pair.eager
    for _ in range(5):
        pair.wrapped(x, y)
        pair.eager_step(x, y)
    biases = trained.attention.in_proj_bias, native.attention.in_proj_bias
    keys, expected = (bias.detach()[8:16] for bias in biases)
    noise = biases[1].grad
    assert noise is not None
    assert noise[8:16].abs().max() < 1e-6 * noise.abs().max()
    assert keys.abs().max() > relative(16, 5)
    assert (keys - expected).abs().max() > relative(16, 5)  # all others are nearer
    with torch.no_grad():
        keys.copy_(expected)
    for (name, got), expected_value in zip(
        trained.named_parameters(), native.parameters(), strict=True
    ):
        torch.testing.assert_close(got, expected_value, atol=relative(16, 5), rtol=0, msg=name)
    before = native(x, y)[0]
    with torch.no_grad():
        expected += 1
    torch.testing.assert_close(native(x, y)[0], before)
