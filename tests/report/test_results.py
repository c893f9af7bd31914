from .fake_run import build_events, page_of
from .test_page import Reader


def text_of(events):
    return Reader(page_of(events)).text


def test_row_has_start_best_and_final():
    # qqp: starts at .631 as the majority class, best .741 in round 4, ends at .731.
    assert "|qqp|accuracy|.631|†|.741|round 4|.731|" in text_of(build_events())


def test_averages_come_from_the_round_events():
    # Round 8, overall: (.815 + .731 + .658) / 3 = .7347; classification: (.815 + .731) / 2 = .773.
    # Classification at the start: (.513 + .631) / 2 = .572; best, round 6: (.814 + .734) / 2 = .774.
    text = text_of(build_events())
    assert "|Overall|mean of main metrics|–|.735|round 8|.735|" in text
    assert "|Classification|mean accuracy|.572|.774|round 6|.773|" in text


def test_averages_without_round_events_are_computed():
    # Round 1: (.641 + .631 + .105) / 3 = .459
    events = [event for event in build_events(1) if event["event"] != "round"]
    assert "|Overall|mean of main metrics|–|.459|round 1|.459|" in text_of(events)


def test_auxiliary_task_is_marked_and_left_out_of_computed_averages():
    # Round 1 without stsb: (.641 + .631) / 2 = .636; at the start (.513 + .631) / 2 = .572
    events = [event for event in build_events(1) if event["event"] != "round"]
    events[0]["tasks"]["stsb"]["auxiliary"] = True
    text = text_of(events)
    assert "|stsb |auxiliary|pearson|" in text
    assert "|Overall|mean of main metrics|.572|.636|round 1|.636|" in text


def test_undefined_final_score_is_a_dash_with_its_reason():
    text = text_of(build_events(0))
    assert "|stsb|pearson|–|–|–|predictions are constant|" in text
    assert "– spearman of stsb at round 0 is undefined: predictions are constant." in text


def test_majority_class_is_said_in_words():
    text = text_of(build_events(1))
    # Of the equal scores at rounds 0 and 1 the earlier one is the best.
    assert "|qqp|accuracy|.631|†|.631|†|round 0|.631|†|equals the majority class|" in text
    assert "† equals the majority class: qqp at round 0, qqp at round 1." in text


def test_score_from_an_earlier_round_says_which():
    events = [e for e in build_events() if not (e["event"] == "evaluation" and e["task"] == "qqp" and e["round"] > 6)]
    assert "|.741|round 4|.734|round 6|" in text_of(events)


def test_all_metrics_of_the_last_evaluation():
    # stsb, round 8: mse 2.4 - 1.2 = 1.2, rmse sqrt(1.2) = 1.095, mae 1.3 - .48 = .82, r2 -.2 + .56 = .36
    text = text_of(build_events())
    assert "|stsb|8|.658|.638|1.200|1.095|.820|.360|.062|123|" in text
    assert "|MSE|1.200|RMSE|1.095|MAE|.820|R²|.360|" in text


def test_confusion_counts_with_row_shares():
    # sst2, round 8: round(.815 * 872) = 711 right, 391 of them negative; 161 wrong, 53 of them negative.
    # 391 / 444 = .881, 53 / 444 = .119; 108 / 428 = .252, 320 / 428 = .748
    text = text_of(build_events())
    assert "|negative|391|.881|53|.119|444|positive|108|.252|320|.748|428|" in text


def test_many_labels_become_a_picture_with_the_worst_pairs():
    events = build_events(0)
    labels = [f"l{i}" for i in range(20)]
    events[0]["tasks"]["sst2"]["labels"] = labels
    matrix = [[9 if i == j else 0 for j in range(20)] for i in range(20)]
    matrix[3][7] = 5
    for event in events:
        if event["event"] == "evaluation" and event["task"] == "sst2":
            event["confusion"] = matrix
    text = text_of(events)
    assert "l3 taken for l7: 5 of 14" in text
    assert "|l3|l7|5|14|" in text


def test_scores_at_clients_are_listed_with_them():
    events = build_events()
    last = next(e for e in reversed(events) if e["event"] == "evaluation" and e["task"] == "sst2")
    last["clients"] = {"clinic_a": 0.8449, "clinic_b": None}
    text = text_of(events)
    # Losses are .7 - .05 * round, in rounds 1 and 8.
    assert "|clinic_a|sst2|1,200|.650|.300|.845|" in text
    assert "|clinic_b|sst2|1,200|.650|.300|–|" in text


def test_a_clients_share_of_each_mean_stands_with_what_it_brought():
    events = build_events(2)
    for event in events:
        if event["event"] == "update" and event["client"] == "forum":
            event["shares"] = {"all": 0.10 * event["round"], "task:qqp": 0.5, "task:sst2": 0.25}
    text = text_of(events)
    # Of the encoder 10 % and 20 % in two rounds: 15 % on the mean; it stands once, with the client's first task.
    assert "|forum|qqp|780|.650|.600|50.0%|15.0%|forum|sst2|170|.650|.600|25.0%|press|" in text
    # The run was to have 8 rounds: a client that begins in the ninth leaves the others as they were.
    assert "was not measured" in text
    assert "--set clients.NAME.from_round=9 --name without, and fedmtl compare first without." in text
    assert "no scores by client" in text


def test_group_scopes_are_named_beside_the_encoder():
    events = build_events(1)
    update = next(event for event in events if event["event"] == "update")
    update["shares"] = {"all": 0.5, "group:pair": 1.0, "task:sst2": 0.5}
    assert "|all 50.0%, group:pair 100.0%|" in text_of(events)


def test_a_change_that_cannot_be_told_from_scatter_stands_with_its_error_and_without_a_word():
    events = build_events()
    for event in events:
        if event["event"] == "evaluation" and event["task"] == "sst2" and event["round"]:
            event["metrics"]["accuracy"] = 0.70 + 0.10 * (event["round"] % 2 == 0)
    text = text_of(events)
    # Rounds 5 to 8 are .70 .80 .70 .80: +.060, and 3 * sqrt(.008 / 2 / 5) = .085.
    assert "|+.060 ± .085|rounds 5–8|" in text
    assert "flat" not in text
