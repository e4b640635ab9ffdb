"""The troubles that people really have with such work, and the tests that show what klbench does about each.

`pytest -m faults` runs them all; `python -m tests.tools.troubles` also writes the table in the README. A
trouble without a test has a reason why klbench cannot have it. Tests are named `file::function` below tests/,
with all their cases, or `file::function[case]` where only that case is about the trouble.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble; `reason` says why it cannot occur where there is no test."""

    title: str
    tests: tuple[str, ...] = ()
    reason: str = ""


TROUBLES: dict[str, Trouble] = {
    # Starting the server.
    "T01": Trouble(
        "radix cache silently off",
        (
            "engine/test_server.py::test_without_a_radix_cache_the_hit_helpers_say_why_they_cannot_run",
            "core/test_exercised.py::test_before_a_run_a_server_without_restores_says_so",
        ),
    ),
    "T02": Trouble(
        "a backend refused that nobody typed",
        ("engine/test_launching.py::test_each_known_error_has_its_next_step[backend-refused]",),
    ),
    "T03": Trouble(
        "torch_native refused by deterministic mode",
        ("insitu/test_cpu_engine.py::test_every_helper_reads_exactly_zero",),
    ),
    "T04": Trouble(
        "deterministic mode without an attention backend crashes",
        reason="sglang 0.5.17 and later choose one themselves; older versions are refused by the doctor",
    ),
    "T05": Trouble(
        "a Triton kernel needs more shared memory than the GPU has",
        ("engine/test_launching.py::test_each_known_error_has_its_next_step[shared-memory]",),
    ),
    "T07": Trouble(
        "a flag that forces other settings",
        ("engine/test_facts.py::test_differences_between_asked_and_in_force_are_named",),
    ),
    "T08": Trouble(
        "port in use, schedulers left over",
        (
            "engine/test_launching.py::"
            "test_a_port_taken_between_its_choice_and_the_bind_ends_the_wait_at_once",
            "engine/test_process.py::test_nothing_is_left_when_the_runner_dies",
            "engine/test_process.py::test_nothing_is_left_when_the_keeper_is_killed",
            "engine/test_orphans.py::test_processes_of_a_launch_without_a_keeper_are_found_and_ended",
            "engine/test_orphans.py::test_a_server_of_the_users_own_launch_is_never_counted",
        ),
    ),
    "T10": Trouble(
        "keys: 401 and 403",
        (
            "engine/test_client.py::test_keys_are_sent_and_never_shown",
            "engine/test_client.py::test_a_refused_key_says_how_to_give_one",
            "engine/test_client.py::test_a_key_variable_that_is_not_set_is_a_usage_error",
            "engine/test_server_key.py::test_a_server_with_a_key_serves_us_and_nobody_else",
        ),
    ),
    "T11": Trouble(
        "proxies and routers in between",
        (
            "engine/test_client.py::test_proxies_are_ignored_on_loopback",
            "engine/test_arms.py::test_an_answer_that_cannot_be_compared_is_refused[hits-not-said]",
            "engine/test_arms.py::test_an_answer_that_cannot_be_compared_is_refused[other-id]",
        ),
    ),
    "T12": Trouble(
        "kernels, weights or tokenizer missing: whose error it is",
        (
            "engine/test_phases.py::test_the_schedulers_own_error_is_told_from_its_wrappers",
            "engine/test_server.py::test_a_launch_that_fails_shows_what_the_server_itself_says",
            "engine/test_launching.py::test_each_known_error_has_its_next_step[kernels]",
            "engine/test_launching.py::test_each_known_error_has_its_next_step[weights]",
            "engine/test_launching.py::test_each_known_error_has_its_next_step[tokenizer]",
        ),
    ),
    "T13": Trouble(
        "the server ends, or hangs, while it starts",
        (
            "engine/test_launching.py::test_a_server_that_ends_says_its_own_error_and_the_next_step",
            "engine/test_launching.py::test_a_scheduler_that_crashed_alone_is_not_waited_for",
            "engine/test_launching.py::test_a_start_that_hangs_says_what_it_was_doing",
            "engine/test_process.py::test_a_failed_server_tells_its_own_error_and_takes_its_children_along",
        ),
    ),
    "T14": Trouble(
        "no tokenizer, or one that adds a first token",
        (
            "engine/test_arms.py::test_a_separator_id_stands_for_the_comma_where_there_is_no_tokenizer",
            "engine/test_arms.py::test_decode_cache_hit_continues_with_a_comma_and_must_hit_generated_tokens",
        ),
    ),
    "T15": Trouble(
        "LongBench without a network, and unseeded",
        (
            "engine/test_prompts.py::test_longbench_comes_from_sglangs_cache_file_where_it_is",
            "engine/test_prompts.py::test_longbench_of_older_versions_lies_in_the_package",
            "engine/test_prompts.py::test_the_same_seed_gives_the_same_prompts_without_special_tokens",
        ),
    ),
    "T16": Trouble(
        "out of memory while input logprobs are computed",
        (
            "engine/test_launching.py::test_each_known_error_has_its_next_step[out-of-memory]",
            "engine/test_launching.py::test_each_known_error_has_its_next_step[not-enough-memory]",
            "engine/test_prompts.py::test_what_scoring_holds_is_estimated",
        ),
    ),
    "T17": Trouble(
        "chunked logits are a path of their own",
        ("core/test_residues.py::test_longer_than_a_chunk_is_found_as_a_limit",),
    ),
    # Measuring.
    "T18": Trouble(
        "flush refused while requests run",
        ("engine/test_client.py::test_a_busy_server_is_not_flushed_silently",),
    ),
    "T19": Trouble(
        "an error body taken for data",
        (
            "engine/test_client.py::test_an_error_body_is_shown_and_never_taken_for_data",
            "engine/test_server.py::test_an_error_of_the_server_is_shown_in_its_own_words",
        ),
    ),
    "T20": Trouble(
        "no progress and no way to cancel",
        (
            "engine/test_arms.py::test_progress_is_counted_from_the_servers_batch_lines",
            "engine/test_what_is_seen.py::test_without_an_answer_about_its_load_no_server_is_given_up",
            "engine/test_what_is_seen.py::test_a_server_that_counted_forwards_and_stops_is_given_up",
            "engine/test_server.py::test_a_cancelled_helper_leaves_nothing_running_on_the_server",
            "engine/test_client.py::test_a_cancelled_generation_is_aborted_on_the_server",
        ),
    ),
    "T21": Trouble(
        "no hit on an arm that should hit",
        (
            "engine/test_arms.py::test_without_any_hit_nothing_is_scored",
            "core/test_kl.py::test_more_than_half_of_the_requests_must_hit",
            "core/test_kl.py::test_prompts_within_a_page_are_the_reason_for_no_hit",
        ),
    ),
    "T23": Trouble(
        "logprobs that are no numbers",
        (
            "core/test_kl.py::test_a_logprob_that_is_no_number_is_named_and_never_averaged",
            "engine/test_client.py::test_null_and_nan_logprobs_are_counted_not_invented",
        ),
    ),
    "T25": Trouble(
        "penalties, filters or grammar in force",
        (
            "engine/test_refusals.py::test_settings_that_make_the_two_paths_incomparable_are_refused[top-p]",
            "engine/test_refusals.py::"
            "test_settings_that_make_the_two_paths_incomparable_are_refused[penalty]",
            "engine/test_refusals.py::"
            "test_settings_that_make_the_two_paths_incomparable_are_refused[grammar]",
        ),
    ),
    "T26": Trouble(
        "speculative decoding",
        (
            "engine/test_refusals.py::test_settings_that_make_the_two_paths_incomparable_are_refused[eagle]",
            "engine/test_refusals.py::test_settings_that_make_the_two_paths_incomparable_are_refused[ngram]",
        ),
    ),
    "T27": Trouble(
        "requests retracted or aborted during a run",
        (
            "engine/test_arms.py::test_requests_that_were_retracted_are_named",
            "engine/test_arms.py::"
            "test_a_first_logprob_that_a_retraction_lost_leaves_its_token_out_of_the_comparison",
            "session/test_attached_manners.py::test_others_on_the_server_and_retracted_requests_are_said",
            "core/test_alignment.py::test_rows_computed_again_after_a_retraction_pair_and_blame_nobody",
        ),
    ),
    "T28": Trouble(
        "requests that end early",
        (
            "core/test_kl.py::test_requests_that_end_early_are_said",
            "engine/test_prompts.py::test_prompts_must_fit_with_what_they_generate",
        ),
    ),
    "T29": Trouble(
        "data-parallel ranks with caches of their own",
        ("engine/test_refusals.py::test_one_rank_of_a_data_parallel_server_takes_all_arms",),
    ),
    "T30": Trouble(
        "prefill and decode on different servers",
        (
            "engine/test_refusals.py::"
            "test_settings_that_make_the_two_paths_incomparable_are_refused[prefill-role]",
            "engine/test_refusals.py::"
            "test_settings_that_make_the_two_paths_incomparable_are_refused[decode-role]",
        ),
    ),
    "T31": Trouble(
        "a zero on one GPU proves nothing for two",
        ("core/test_calibration.py::test_the_key_holds_what_changes_a_floor",),
    ),
    "T32": Trouble(
        "huge responses",
        (
            "engine/test_client.py::test_a_generate_request_has_exactly_the_fields_that_sglangs_helpers_send",
            "engine/test_client.py::test_an_answer_without_end_is_cut_off",
        ),
    ),
    "T33": Trouble(
        "4 samples taken for 32",
        ("core/test_statistics.py::test_fewer_samples_than_sglangs_are_warned_about",),
    ),
    "T34": Trouble(
        "a mean that hides one request",
        (
            "core/test_kl.py::test_a_difference_that_the_mean_cannot_see_is_still_a_divergence",
            "core/test_kl.py::test_the_tail_stands_beside_the_mean",
        ),
    ),
    "T35": Trouble(
        "quantised paths that cannot be batch-invariant",
        ("core/test_calibration.py::test_a_floor_by_nature_is_said",),
    ),
    "T37": Trouble(
        "other clients on the server",
        (
            "session/test_attached_manners.py::test_others_on_the_server_and_retracted_requests_are_said",
            "session/test_leave.py::test_whichever_job_is_first_asks_and_does_nothing_before",
            "engine/test_others.py::"
            "test_one_request_of_others_in_a_forward_of_ours_is_seen_however_few_of_ours_run",
            "engine/test_others.py::test_counts_beyond_the_requests_of_an_arm_are_of_others",
            "engine/test_arms.py::test_the_load_is_told_to_whom_it_concerns",
            "insitu/test_composition.py::test_a_capture_in_other_batches_is_another_experiment",
        ),
    ),
    "T38": Trouble(
        "environment that changes numbers",
        (
            "session/test_comparing.py::"
            "test_other_settings_are_refused_by_name_unless_the_user_insists[environment]",
        ),
    ),
    # Capturing.
    "T40": Trouble(
        "a capture fills the disk",
        (
            "session/test_forecasting.py::"
            "test_what_will_be_written_is_said_in_the_log_and_on_the_command_line",
            "session/test_forecasting.py::"
            "test_what_a_user_does_not_agree_to_is_not_written_and_says_what_to_do",
            "session/test_forecasting.py::test_without_a_user_much_is_refused_with_the_option_that_agrees",
            "engine/test_capture.py::test_a_disk_that_is_too_full_is_refused_before_anything_runs",
            "engine/test_capture.py::test_a_floor_that_is_passed_during_a_capture_cuts_it_and_not_the_server",
            "insitu/test_digest_capture.py::test_a_full_disk_makes_the_trace_invalid",
        ),
    ),
    "T41": Trouble(
        "a dumper that writes no module and says nothing",
        ("engine/test_dumper_control.py::test_a_dumper_without_hooks_or_in_use_is_refused",),
    ),
    "T42": Trouble(
        "/dumper answers 404",
        ("engine/test_refusals.py::test_a_server_without_the_dumpers_route_has_no_dumper",),
    ),
    "T43": Trouble(
        "/dumper/reset removes the hooks for good",
        ("engine/test_capture.py::test_nothing_of_the_dump_is_left_and_no_port_was_opened",),
    ),
    "T44": Trouble(
        "dumps of two arms mixed in one folder",
        (
            "insitu/test_capture_switch.py::"
            "test_the_forwards_of_two_arms_are_dumped_into_folders_of_their_own",
            "engine/test_dumper_control.py::"
            "test_each_capture_has_a_name_of_its_own_behind_a_proof_that_arrived",
            "engine/test_capture_folders.py::"
            "test_a_capture_never_writes_among_the_dumps_or_the_trace_of_another",
        ),
    ),
    "T45": Trouble(
        "hooks silent under CUDA graphs",
        ("engine/test_refusals.py::test_a_server_with_graphs_is_not_captured_silently",),
    ),
    "T46": Trouble(
        "the prefill graph is a switch of its own",
        ("engine/test_facts.py::test_eager_flags_are_spelled_as_the_installed_sglang_takes_them",),
    ),
    "T47": Trouble(
        "--debug-tensor-dump-* asserts on the top module's name",
        reason="klbench does not use those flags: its plugin or the dumper sees every module",
    ),
    "T48": Trouble(
        "rows of the two arms misaligned",
        (
            "core/test_alignment.py::"
            "test_prefill_and_decode_rows_pair_with_the_scoring_rows_of_their_positions",
            "core/test_alignment.py::test_another_token_at_a_position_refuses_with_both_tokens",
            "core/test_alignment.py::test_another_embedding_refuses_with_its_position",
        ),
    ),
    "T49": Trouble(
        "another batch is another experiment",
        ("insitu/test_composition.py::test_a_capture_in_other_batches_is_another_experiment",),
    ),
    "T50": Trouble(
        "the divergence goes away when it is looked at",
        (
            "core/test_confirmation.py::test_a_missing_proof_leaves_the_grade_and_is_said[symptom-gone]",
            "session/test_graphs_alone.py::"
            "test_what_goes_away_eager_is_looked_for_in_the_state_of_the_server_as_it_was",
            "engine/test_hidden_faults.py::"
            "test_what_hides_from_hooks_is_found_in_the_state_and_what_does_not_in_its_operator",
        ),
    ),
    "T51": Trouble(
        "code between hooked modules",
        ("core/test_localisation.py::test_unhooked_code_between_two_operators_is_a_gap",),
    ),
    "T52": Trouble(
        "inputs changed in place",
        (
            "insitu/test_digest_capture.py::"
            "test_what_a_module_changes_in_place_is_seen_as_it_was_and_as_it_became",
        ),
    ),
    "T53": Trouble(
        "other names for one tensor in the two arms",
        (
            "insitu/test_dumps.py::test_names_of_one_tensor_and_of_several_and_of_shared_modules_are_one_name",
            "core/test_localisation.py::test_inputs_missing_in_one_arm_are_never_equal",
        ),
    ),
    "T54": Trouble(
        "ranks that overwrite one file",
        ("engine/test_traces.py::test_shards_and_ranks_are_joined_with_their_indices",),
    ),
    "T55": Trouble(
        "another dtype in one arm",
        ("core/test_alignment.py::test_a_tensor_of_another_type_in_one_arm_is_not_observed_and_not_equal",),
    ),
    "T56": Trouble(
        "ranks wait for each other over a name",
        ("engine/test_capture_control.py::test_a_capture_is_open_once_every_rank_has_agreed",),
    ),
    "T57": Trouble(
        "the watchdog ends a slow forward",
        (
            "engine/test_facts.py::test_the_watchdog_of_a_server_that_is_captured_waits_longer",
            "engine/test_launching.py::"
            "test_a_server_that_sglangs_own_checks_end_says_which_and_what_follows[watchdog]",
            "engine/test_phases.py::"
            "test_the_watchdog_that_ended_the_server_is_its_own_error_among_all_those_stacks",
        ),
    ),
    "T58": Trouble(
        "a probe that reads a value crashes a graph's capture",
        (
            "insitu/test_capture_switch.py::"
            "test_while_a_graph_is_captured_no_value_is_read_no_module_hooked_and_nothing_switched_on",
        ),
    ),
    "T59": Trouble(
        "a probe that never fired reads as no difference",
        (
            "insitu/test_faults.py::test_the_proof_lies_in_the_control_folder_and_says_when_nothing_fired",
            "core/test_localisation.py::test_an_unproved_alignment_locates_nothing",
        ),
    ),
    "T61": Trouble(
        "dump files loaded as code",
        ("insitu/test_dumps.py::test_a_file_that_would_run_code_is_not_run_and_makes_the_trace_invalid",),
    ),
    "T62": Trouble(
        "files cut off by a full disk",
        (
            "engine/test_traces.py::test_a_shard_cut_at_any_byte_is_refused_by_name",
            "insitu/test_dumps.py::test_a_file_that_the_dumper_failed_to_write_is_noticed",
            "session/test_full_disk.py::test_a_disk_that_fills_up_ends_the_run_and_with_room_again_it_goes_on",
            "session/test_full_disk.py::test_a_log_that_cannot_grow_ends_the_runner_with_its_last_words",
        ),
    ),
    # Running and ending.
    "T63": Trouble(
        "the server dies in the middle of a run",
        (
            "engine/test_server.py::test_a_server_that_dies_says_how_and_leaves_nothing",
            "engine/test_process.py::test_a_server_killed_by_the_kernel_says_so",
            "engine/test_arms.py::test_a_server_that_works_on_nothing_is_said_and_given_up",
        ),
    ),
    "T64": Trouble(
        "pool leak: sglang's own check of its cache",
        (
            "session/test_cache_checks.py::test_a_leak_that_the_server_only_logs_is_told_as_a_lead",
            "engine/test_launching.py::"
            "test_a_server_that_sglangs_own_checks_end_says_which_and_what_follows[pool-leak]",
        ),
    ),
    "T65": Trouble(
        "Ctrl-C leaves processes or a broken terminal",
        (
            "cli/test_headless.py::test_a_signal_ends_it_in_order_and_the_document_says_so",
            "cli/test_real_server.py::test_kill_9_of_a_headless_command_leaves_no_process",
            "tui/test_terminal.py::test_a_signal_detaches_and_restores_the_terminal",
        ),
    ),
    "T66": Trouble(
        "two klbench on one folder",
        (
            "session/test_folder.py::test_two_klbench_on_one_folder_refuse_and_name_the_first",
            "session/test_folder.py::test_of_many_that_take_a_lock_at_once_one_wins",
            "cli/test_headless.py::test_a_session_in_use_is_refused",
        ),
    ),
    "T67": Trouble(
        "results that cannot be compared",
        ("session/test_comparing.py::test_another_experiment_is_refused_by_name_even_if_the_user_insists",),
    ),
}

BAD_INPUTS: dict[str, tuple[str, ...]] = {
    "prompt files": (
        "engine/test_prompts.py::test_a_line_that_is_no_prompt_is_named_by_its_number",
        "engine/test_prompts.py::test_a_line_without_end_is_not_read_into_memory",
        "engine/test_prompts.py::test_an_empty_or_missing_file_is_a_usage_error",
        "engine/test_prompts.py::test_ids_that_would_end_the_server_are_refused",
    ),
    "servers that answer garbage": (
        "engine/test_client.py::test_an_answer_of_another_shape_is_an_error_with_words",
        "engine/test_client.py::test_an_answer_without_end_is_cut_off",
        "engine/test_client.py::test_a_connection_that_breaks_off_is_an_error_with_words",
        "engine/test_arms.py::test_an_answer_that_cannot_be_compared_is_refused",
    ),
    "traces and tensors": (
        "engine/test_traces.py::test_a_shard_cut_at_any_byte_is_refused_by_name",
        "engine/test_traces.py::test_a_header_that_claims_too_much_is_refused",
        "engine/test_traces.py::test_an_index_outside_its_table_is_refused",
        "engine/test_traces.py::test_a_damaged_rank_file_is_refused_by_name",
        "engine/test_packed.py::test_tables_that_contradict_each_other_are_refused",
        "engine/test_packed.py::test_a_column_of_endless_steps_is_refused",
        "engine/test_export.py::test_a_damaged_file_is_refused",
        "engine/test_export.py::test_a_name_that_would_be_code_never_reaches_the_script",
    ),
    "sessions": (
        "session/test_log.py::test_a_log_cut_at_any_byte_loads_the_events_before_the_cut",
        "session/test_log.py::test_a_damaged_line_costs_only_itself",
        "session/test_log.py::test_a_line_without_end_is_given_up_and_the_next_one_read",
        "session/test_damaged_sessions.py::test_a_log_with_any_byte_changed_opens",
        "session/test_damaged_sessions.py::test_damaged_columns_load_or_are_refused_and_the_rest_opens",
        "tui/test_named_files.py::test_no_name_in_a_log_leads_out_of_the_session",
        "tui/test_named_files.py::test_no_file_of_a_session_is_read_through_a_link_or_a_pipe",
        "session/test_runner.py::test_a_strange_command_is_refused_and_the_next_one_done",
        "session/test_runner.py::test_an_endless_command_is_hung_up_on",
    ),
    "bundles": (
        "session/test_bundle.py::test_a_name_that_has_no_place_in_a_bundle_refuses_all_of_it",
        "session/test_bundle.py::test_a_link_is_refused_and_not_followed",
        "session/test_bundle.py::test_what_unpacks_to_too_much_is_refused_whatever_its_header_says",
        "session/test_bundle.py::test_a_damaged_bundle_opens_as_a_session_or_is_refused",
        "session/test_bundle.py::test_what_was_unpacked_starts_no_server_of_a_strangers_choice",
        "tui/test_named_files.py::test_a_bundle_has_no_traces_wherever_it_says_that_they_lie",
        "tui/test_named_files.py::test_repeating_a_bundle_takes_over_no_path_of_another_machine",
    ),
    "tokens and texts": (
        "tui/test_terminal.py::test_hostile_tokens_reach_the_terminal_only_spelled_out",
        "session/test_report_formats.py::test_a_hostile_session_is_text_in_the_page",
        "session/test_report_formats.py::test_a_hostile_session_mentions_nobody_in_an_issue",
        "engine/test_emit_test.py::test_hostile_values_stay_values",
    ),
    "command lines": (
        "cli/test_commands.py::test_a_wrong_command_line_gives_2_and_says_what_is_right",
        "cli/test_commands.py::test_an_address_that_cannot_be_one_is_a_usage_error_and_leaves_no_session",
        "insitu/test_faults_catalogue.py::test_what_cannot_be_planted_is_refused_with_what_can",
    ),
}
"""What comes from outside and is refused clearly, by where it comes from."""


def named_tests() -> set[str]:
    """Every test named above."""
    named = {test for trouble in TROUBLES.values() for test in trouble.tests}
    return named.union(*BAD_INPUTS.values())


def name_of(nodeid: str) -> str:
    """The case that pytest's id names, as above: `file::function[case]`, without the class."""
    file, _, rest = nodeid.removeprefix("tests/").partition("::")
    function, bracket, case = rest.partition("[")
    return f"{file}::{function.rpartition('::')[2]}{bracket}{case}"


def is_named(case: str, tests: Collection[str]) -> bool:
    """Whether the case is one of the tests, or of one that is named with all its cases."""
    return case in tests or case.partition("[")[0] in tests
