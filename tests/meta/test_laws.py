"""Each law of the design is proven by a default test at least, and by those of the slow tier."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

DEFAULT = {
    "1 append is atomic": (
        "store/test_crash.py::test_kill_between_appends_loses_nothing_that_was_returned",
        "store/test_crash.py::test_kill_within_a_stream_leaves_nothing_of_it",
        "store/test_append.py::test_a_retry_stores_nothing_twice",
    ),
    "2 facts do not change": (
        "store/test_append.py::test_the_id_of_a_stored_row_with_other_content_is_refused",
        "store/test_append.py::test_nothing_of_the_store_updates_a_row",
    ),
    "3 tokens are the truth": (
        "loop/trajectories/test_chat_templates.py::test_tokens_that_would_be_others_when_tokenized_again_stay_as_they_were",
        "loop/trajectories/test_chat_templates.py::test_rows_hold_all_that_was_sampled_and_every_column_is_aligned",
    ),
    "4 versions are true": (
        "loop/trainer/test_true_versions.py::test_a_planted_lie_about_weights_is_found",
        "loop/inference/test_transformers_engine.py"
        "::test_every_token_has_the_log_prob_of_the_weights_that_its_segment_names",
    ),
    "5 NULL is not zero": (
        "store/test_views.py::test_null_is_not_zero_in_a_group",
        "loop/rollouts/test_group.py::test_a_reward_of_none_makes_the_reward_null_and_not_zero",
    ),
    "6 nothing vanishes": (
        "operators/test_invariants.py::test_every_public_operator_obeys_its_law_and_sees_no_more_than_it_says",
        "pipelines/test_pipeline.py"
        "::test_pairs_are_stored_with_a_reason_for_every_row_that_is_in_none",
        "store/test_replay.py::test_stale_rows_stay_and_only_are_not_drawn",
    ),
    "7 group integrity": (
        "store/test_replay.py::test_groups_stay_whole",
        "pipelines/test_plan.py::test_a_row_filter_before_an_operator_of_whole_groups_is_refused",
    ),
    "8 freshness where rows are drawn": (
        "store/test_replay.py::test_no_row_beyond_max_lag_is_ever_drawn",
    ),
    "9 exactly once": (
        "loop/runs/test_crash.py::test_a_short_run_killed_in_mid_step_ends_as_if_never_killed",
        "loop/trainer/test_replay.py::test_a_replay_that_is_interrupted_goes_on_as_if_it_had_not_been",
    ),
    "10 reproducible": (
        "loop/trainer/test_verify.py::test_every_batch_is_drawn_again_the_same",
        "loop/trainer/test_verify.py::test_one_flipped_byte_in_a_payload_is_found_and_named",
    ),
    "11 the loss is invariant": (
        "loop/trainer/test_invariance.py::test_the_step_does_not_depend_on_how_it_is_cut_ordered_or_padded",
    ),
    "12 no silent failure": (
        "store/test_wait.py::test_a_wait_ends_and_says_what_it_waited_for",
        "store/test_wait.py::test_a_commit_of_another_process_wakes_a_waiter_at_once",
        "loop/runs/test_job.py::test_a_failed_job_is_on_record_with_its_error",
    ),
    "13 one bad row never stops a job": (
        "loop/rollouts/test_group.py"
        "::test_a_workflow_that_raises_becomes_a_row_that_says_so_and_the_others_go_on",
        "pipelines/test_failing_rows.py"
        "::test_rows_that_fail_go_on_with_null_and_their_error_is_stored",
    ),
    "14 the cost of a draw": (
        "store/test_replay_rows.py::test_the_index_takes_less_than_100_bytes_a_row",
    ),
    "16 a name means one value everywhere": (
        "loop/trainer/test_replay.py::test_a_replaced_reward_is_what_every_choice_of_rows_sees",
        "loop/trainer/test_foreign_tokens.py"
        "::test_rows_of_a_permuted_alphabet_are_refused_and_the_ways_out_are_named",
        "loop/trainer/test_sampling_distribution.py::test_on_policy_ratios_are_one_however_tokens_are_sampled",
    ),
    "17 nothing done is not success": (
        "loop/trainer/test_offline.py"
        "::test_a_run_that_could_train_on_nothing_fails_and_publishes_no_weights",
        "cli/test_pipeline.py::test_a_pipeline_whose_source_is_empty_did_nothing",
    ),
    "15 bounded in bytes": (
        "store/test_group_commit.py::test_a_full_queue_makes_writers_wait_for_room",
        "store/test_group_commit.py::test_a_queue_that_stays_full_is_said_to_be_so",
        "store/test_append.py::test_a_stream_is_read_batch_by_batch",
    ),
}
"""By law, tests of the default selection that fail when it is broken."""


@pytest.mark.parametrize("law", DEFAULT)
def test_every_law_is_proven_by_a_default_test(law: str) -> None:
    for named in DEFAULT[law]:
        path, _, name = named.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        found = {
            node.name: [ast.unparse(mark) for mark in node.decorator_list]
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert name in found, named
        assert not any("mark.slow" in mark for mark in found[name]), f"{named} is slow"


def test_the_table_of_guarantees_names_files_of_their_tiers() -> None:
    text = (TESTS.parent / "docs" / "guarantees.md").read_text(encoding="utf-8")
    table = text.partition("| guarantee | default tests |")[2].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    assert {number for law, _, _ in rows for number in re.findall(r"\b\d+\b(?= )", law)} == {
        law.split()[0] for law in DEFAULT
    }
    for _, default, slow in rows:
        for cell, is_slow in ((default, False), (slow, True)):
            folder = ""
            for name in re.findall(r"`([\w/.]+\.py)`", cell):
                folder = name.rpartition("/")[0] or folder
                marks = (TESTS / folder / name.rpartition("/")[2]).read_text(encoding="utf-8")
                assert not is_slow or "mark.slow" in marks, name
