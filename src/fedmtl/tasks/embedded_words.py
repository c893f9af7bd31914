"""The words of the embedded data: tables only, a row is one meaning and its columns are ways to say it."""

from __future__ import annotations

PEOPLE = (
    ("doctor", "physician"),
    ("lawyer", "attorney"),
    ("teacher", "instructor"),
    ("actor", "performer"),
    ("writer", "author"),
    ("thief", "robber"),
    ("child", "kid"),
    ("soldier", "trooper"),
    ("cook", "chef"),
    ("pilot", "aviator"),
)

# Past tense and participle are equal, so active and passive share one form.
VERBS = (
    ("helped", "assisted"),
    ("watched", "observed"),
    ("followed", "trailed"),
    ("praised", "applauded"),
    ("blamed", "accused"),
    ("hired", "employed"),
    ("mocked", "ridiculed"),
    ("rescued", "saved"),
    ("questioned", "interrogated"),
    ("greeted", "welcomed"),
)

NEGATIONS = ("never", "at no time")

SETTINGS = (
    "in the garden",
    "in the kitchen",
    "at the station",
    "at the market",
    "near the river",
    "near the harbor",
    "on monday",
    "on friday",
    "last week",
    "last night",
    "this morning",
    "this evening",
)

WORKS = (
    "film",
    "movie",
    "story",
    "novel",
    "book",
    "play",
    "song",
    "album",
    "show",
    "concert",
    "series",
    "comedy",
)
PARTS = ("start", "ending", "cast", "script", "premise", "melody", "title", "cover")
OPENERS = ("", "", "", "i think", "we agree", "critics say", "frankly ,", "overall ,")
INTENSIFIERS = ("very", "truly", "quite", "rather", "really", "simply")

# By sentiment: row 0 is negative, row 1 positive.
ADJECTIVES = (
    (
        *("dull", "tedious", "clumsy", "bland", "silly", "boring", "awful", "lifeless"),
        *("dreary", "shallow", "messy", "stale", "weak", "ugly", "painful", "pointless"),
    ),
    (
        *("charming", "brilliant", "funny", "moving", "clever", "fresh", "warm", "gripping"),
        *("lovely", "superb", "delightful", "honest", "elegant", "inspired", "thrilling", "touching"),
    ),
)
NOUNS = (("failure", "bore", "mess", "chore"), ("triumph", "delight", "treat", "gem"))

GRAMMAR = (
    *(
        "the",
        "was",
        "by",
        "but",
        "not",
        "never",
        "at",
        "all",
        "far",
        "from",
        "hardly",
        "a",
        "an",
        "and",
        "is",
    ),
    *("despite", ","),
)
