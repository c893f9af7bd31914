"""The numbers of the comparison that this study rebuilds, as printed, under the names of what they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """A row: what was scored and how, and the scores of sentiment, paraphrase and similarity where they were printed.

    `closeness` is max(0, 1 - MSE) of scores divided by 5, which the comparison calls accuracy.
    """

    words: str
    how: str
    sentiment: float | None = None
    paraphrase: float | None = None
    pearson: float | None = None
    closeness: float | None = None


_CUT = "cut from GLUE's train, best round of each"
PRINTED = (
    Printed("printed: federated, best (rounds 12, 29, 2)", _CUT, 0.816, 0.830, None, 0.9309),
    Printed("printed: federated, round 30", "cut from GLUE's train", 0.800, 0.828, None, 0.8877),
    Printed("the training mean for every pair", "the same split", None, None, None, 0.9142),
    Printed("printed: 'published Tiny BERT', sst2", "GLUE test; TinyBERT-4, 14.5M, distilled", 0.930),
    Printed("printed: 'published Tiny BERT', qqp", "GLUE test; F1, not accuracy", None, 0.711),
    Printed("printed: 'published Tiny BERT', stsb", "GLUE test; Spearman, not Pearson", None, None, 0.85),
    Printed("its author's best, 3 clients, all data", "cut from GLUE's train", 0.927, 0.848, 0.683),
    Printed("bert-tiny, centralized (Turc et al.)", "GLUE test", 0.832, 0.834, 0.743),
)
NOTES = (
    "The printed 93.09% for STS-B is max(0, 1 - MSE) of scores divided by 5. Predicting the training mean for every"
    " pair has 91.42% there: its best round is 1.7 points above a constant, and its last round, 88.77%, is below it.",
    "Row N there is scored before round N: the best score, of round 2, is that of a model after one round, whose"
    " answers are still near the mean. Later they leave it, and squared errors grow wherever they leave it"
    " in the wrong direction; that is our reading. Whether pairs are ranked right is what Pearson's r says.",
    "The qqp of 71.1% it compares with is F1 in the papers, the sst2 of 93% another model's: what it calls better or"
    " worse than centralized compares unlike things. Its own centralized QQP is MRPC.",
    "Scores on a split cut from train are optimistic for sst2, whose phrases overlap. qqp here is public parts of Quora"
    " Question Pairs, not GLUE's split, where the data folder is the project's.",
    "Ours, best: each task at its best round, as there; optimistic, as it is chosen by the examples it is"
    " scored on. A saved model is that of the last round.",
)
WHY = (
    "Final is the score of the one model that a run saves: after the last round, all tasks. Best is over all rounds.",
    "Why it may fall: an encoder is where its tasks pull it to, and as the learning rate falls to zero those win that"
    " make most steps (our reading); a small task makes few. It is held by its weight (tasks.stsb.weight), by more and"
    " smaller steps (tasks.stsb.batch_size), and best by a last layer of its own (sharing.rules). By examples"
    " (federated-weighted) stsb has a twentieth of the say.",
)
