"""Where somebody stumbled who used the program for the first time, and the test that fails if it happens again.

The list is of names; each test stands with what it tests, and runs there.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

STUMBLES = {
    # Settings
    "nothing set gave models worse than TF-IDF": (
        "config/test_auto.py::test_the_encoder_in_the_box_is_used_as_its_card_says"
    ),
    "another encoder kept the demonstration's rate and stayed at chance": (
        "config/test_auto.py::test_the_demonstration_with_another_encoder_has_that_encoders_settings"
    ),
    "sharing a layer cost large tasks points": (
        "config/test_auto.py::test_layers_are_shared_by_small_tasks_and_not_by_large_ones"
    ),
    "nobody could see where a value came from": "config/test_auto.py::test_a_given_value_wins_and_says_so",
    "a chosen config did not come back the same": (
        "experiment/test_chosen.py::test_the_config_of_a_run_with_chosen_settings_reproduces_it"
    ),
    "round 0 of a similarity task was worse than the encoder's cosine": (
        "model/test_multitask.py::test_the_score_of_two_texts_apart_begins_as_their_cosine"
    ),
    "a prediction of 6.94 on a scale of 1 to 5": (
        "tasks/kinds/test_regression.py::test_an_answer_beyond_the_range_is_its_end_and_is_scored_as_such"
    ),
    "a stranger's encoder folder decided on any setting": (
        "config/test_auto.py::test_a_card_with_anything_else_is_refused_by_name"
    ),
    # Files
    "a label with a typing mistake became a class": (
        "tasks/test_check.py::test_a_run_names_a_label_that_looks_like_a_typing_mistake"
    ),
    "a hundred classes of one example were a hundred warnings": (
        "tasks/test_check.py::test_a_hundred_labels_of_one_example_are_one_warning"
    ),
    "scores with decimal commas became classes": (
        "tasks/test_check.py::test_a_run_is_warned_of_labels_with_decimal_commas"
    ),
    "a client with one class went unseen": "tasks/test_check.py::test_a_run_names_clients_with_one_label",
    "the same text was trained on and scored": (
        "tasks/test_check.py::test_a_run_counts_the_texts_that_the_cut_of_validation_leaves_together"
    ),
    "a csv with semicolons could not be checked": (
        "cli/test_check.py::test_a_file_with_semicolons_is_read_with_its_delimiter"
    ),
    "a run needed to be told of a spreadsheet's semicolons, which its header shows": (
        "tasks/test_sources.py::test_a_run_reads_a_spreadsheets_export_by_its_columns"
    ),
    "columns called by two words were taken for an example": (
        "tasks/test_check.py::test_names_of_some_words_are_names_where_a_config_or_another_column_says_so"
    ),
    "a message of a csv with semicolons and two-word columns did not say so": (
        "tasks/test_sources.py::test_without_them_the_message_says_what_to_write"
    ),
    "one answer took twice as long as importing torch": (
        "cli/test_start_up.py::test_one_answer_from_a_cold_start_imports_torch_or_onnxruntime_and_little_else"
    ),
    "columns by number of a csv with semicolons were columns by commas": (
        "predict/test_text_files.py::test_columns_by_number_are_those_that_the_tasks_columns_are_separated_by"
    ),
    "a tenth of a client's file neither trained nor scored, and nobody said so": (
        "tasks/test_check.py::test_a_run_counts_examples_of_clients_files_that_neither_train_nor_score"
    ),
    "the line that times predict named a file that export no longer writes": (
        "test_doc_commands.py::test_the_lines_of_a_page_run_in_their_order"
    ),
    "after two rounds the learning rate was blamed": (
        "runs/test_verdicts.py::test_what_to_try_follows_from_what_the_losses_did"
    ),
    "a run folder was checked as if it were data": (
        "cli/test_check.py::test_the_folder_of_a_run_is_refused_with_what_to_check_instead"
    ),
    "a label 01 became the number 1": "config/test_file.py::test_labels_keep_their_leading_zero_and_are_no_dates",
    # What a run says
    "a run worse than a linear model was called done": (
        "runs/test_verdicts.py::test_all_baselines_that_win_are_in_one_line_the_best_first"
    ),
    "a run worse than no training was called done": (
        "runs/test_verdicts.py::test_a_run_that_is_worse_than_untrained_says_so"
    ),
    "the best round had passed and nobody said so": (
        "runs/test_verdicts.py::test_a_better_round_is_named_with_how_to_open_it"
    ),
    "overfitting was said of a loss of nearly nothing": (
        "runs/test_verdicts.py::test_a_loss_of_nearly_nothing_that_rises_is_no_overfitting"
    ),
    "nobody said what sharing costs a task": "runs/test_verdicts.py::test_what_sharing_costs_is_said_where_it_is_known",
    "ten lines a round": "cli/test_progress.py::test_a_round_is_one_line_and_the_first_names_the_metrics",
    "no way to be quiet": "cli/test_progress.py::test_quiet_leaves_warnings_and_failures",
    "logs of a server had no time": "cli/test_progress.py::test_the_lines_of_a_server_begin_with_their_date_and_time",
    "compare cut names": (
        "cli/test_tables.py::test_runs_that_do_not_fit_beside_each_other_are_compared_in_more_tables_and_no_name_is_cut"
    ),
    "status said running after the server was killed": (
        "runs/test_status.py::test_a_run_without_a_process_was_killed_unless_it_ended"
    ),
    "status did not say who is missing": (
        "runs/test_status.py::test_who_has_not_come_and_who_was_not_in_the_last_round_is_named"
    ),
    "flat stood beside a change of .028": (
        "report/test_results.py::test_a_change_that_cannot_be_told_from_scatter_stands_with_its_error_and_without_a_word"
    ),
    "a hash did not say for which kernels it is": (
        "report/test_page.py::test_the_hash_of_the_weights_stands_with_what_it_depends_on"
    ),
    # Answers
    "predict read no gz, jsonl or parquet": (
        "predict/test_text_files.py::test_every_format_gives_the_same_rows_with_their_lines_and_ids"
    ),
    "a pipe was answered at its end": (
        "predict/test_text_files.py::test_a_line_of_a_pipe_is_there_before_the_next_is_written"
    ),
    "a large file was read whole": (
        "predict/test_text_files.py::test_a_large_file_comes_in_chunks_and_is_not_read_ahead"
    ),
    "evaluate had no test files": "cli/test_finished_runs.py::test_evaluate_scores_test_files_and_writes_every_answer",
    "a local run could be scored for one client at a time": (
        "cli/test_finished_runs.py::test_evaluate_scores_every_client_where_values_stay_there"
    ),
    "one text loaded code that only training needs": (
        "cli/test_start_up.py::test_an_answer_loads_no_code_that_it_does_not_compute_with"
    ),
    "an answer depended on the texts beside it": (
        "predict/test_run.py::test_an_answer_does_not_depend_on_the_texts_beside_it"
    ),
    # Models that leave
    "only some models could be exported": (
        "export/test_every_task.py::test_every_model_of_the_configs_folder_leaves_and_answers_alike"
    ),
    "an export needed fedmtl to answer": (
        "export/test_every_task.py::test_a_process_that_cannot_import_fedmtl_gives_our_answers"
    ),
    "a run's encoder could not be loaded": (
        "export/test_encoder.py::test_a_finished_run_has_an_encoder_that_transformers_loads"
    ),
    "shared weights were stored for each task": (
        "export/test_encoder.py::test_with_layers_by_task_each_task_has_a_folder_and_shared_values_are_stored_once"
    ),
    # Installing and the network
    "a missing extra was a traceback": (
        "cli/test_extras.py::test_a_missing_extra_is_one_line_with_a_command_that_installs_it"
    ),
    "a hub out of reach cost 46 seconds of retries": (
        "model/test_encoder.py::test_a_hub_that_does_not_answer_is_not_tried_again_and_again"
    ),
    "a documented command did not run": (
        "test_doc_commands.py::test_every_line_of_every_page_runs_or_has_a_reason_not_to"
    ),
    "the deployment page ended in labels that differ": (
        "test_doc_commands.py::test_the_lines_of_the_deployment_page_run_with_a_server_and_its_sites"
    ),
    "a study took no config of the user's": (
        "studies/test_federated_command.py::test_a_users_own_config_is_compared_in_all_modes"
    ),
}


@cache
def named_in(path: str) -> frozenset[str]:
    tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_there_are_forty():
    assert len(set(STUMBLES.values())) == len(STUMBLES) >= 40


@pytest.mark.parametrize("stumble", STUMBLES)
def test_a_stumble_has_a_test(stumble):
    path, name = STUMBLES[stumble].split("::")
    assert name.startswith("test_")
    assert name in named_in(path)
