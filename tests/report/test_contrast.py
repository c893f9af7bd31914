"""The colours of text are dark enough on light paper and light enough on dark paper (WCAG 2, level AA)."""

import re

import pytest

from fedmtl.report.single_page import STYLE

READABLE = 4.5


def palettes():
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    found = dict(re.findall(r"--(\w+): (#\w{6})", light))
    return {"light": found, "dark": {**found, **dict(re.findall(r"--(\w+): (#\w{6})", dark))}}


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    low, high = sorted((luminance(one), luminance(two)))
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_21():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("paper", ["paper", "wash"])
def test_text_can_be_read(scheme, paper):
    colours = palettes()[scheme]
    weak = {
        name: round(contrast(colours[name], colours[paper]), 2)
        for name in ("ink", "quiet", "accent", "good", "bad", "warn")
        if contrast(colours[name], colours[paper]) < READABLE
    }
    assert weak == {}
