"""Likely personal data in a text: addresses of mail and machines, and numbers of phones, accounts, cards and persons.

Patterns, and check digits where a number has them, say what is likely. Names, addresses and whatever has no pattern are
not found, and a number that looks like a phone's may be none: counts are for a person to look into.
"""

from __future__ import annotations

import re
from collections import Counter
from ipaddress import IPv6Address
from itertools import pairwise

DIGITS = re.compile(r"[0-9][0-9 .()/-]{4,}[0-9]")
EMAIL = re.compile(r"[\w.+-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63})+")
IBAN = re.compile(r"\b[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b", re.IGNORECASE)
CARD = re.compile(r"(?<![\w.])[2-6](?:[ -]?[0-9]){12,18}(?!\w)")
SOCIAL_SECURITY = re.compile(r"(?<![\w-])(?!000|666|9)[0-9]{3}-(?!00)[0-9]{2}-(?!0000)[0-9]{4}(?![\w-])")
NATIONAL_INSURANCE = re.compile(
    r"\b(?!BG|GB|NK|KN|TN|NT|ZZ)[A-CEGHJ-PR-TW-Z][A-CEGHJ-NPR-TW-Z] ?[0-9]{2} ?[0-9]{2} ?[0-9]{2} ?[A-D]\b",
    re.IGNORECASE,
)
IPV4 = re.compile(r"(?<![\w.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![\w.]*[0-9])")
IPV6 = re.compile(r"(?<![\w:])(?:[0-9a-f]{0,4}:){2,7}[0-9a-f]{0,4}(?![\w:])", re.IGNORECASE)
PHONE = re.compile(
    r"(?<![\w.])(?:"
    r"(?:\+|00)[1-9][0-9]{0,2}[ ./-]?(?:\(?[0-9]{1,4}\)?[ ./-]?){1,5}[0-9]{2,4}"
    r"|\([0-9]{2,5}\) ?[0-9]{3,4}[ -]?[0-9]{3,4}"
    r"|[0-9]{3}[-. ][0-9]{3}[-. ][0-9]{4}"
    r"|0[1-9][0-9]{1,3}[ /-][0-9]{3,4}[ -]?[0-9]{3,5}"
    r")(?!\w)"
)


def may_have_personal_data(text: str) -> bool:
    """Say in less than a microsecond whether `personal_data` can find anything."""
    return "@" in text or DIGITS.search(text) is not None or text.count(":") > 1


def personal_data(text: str) -> Counter[str]:
    """Count what looks like personal data in a text, by its kind; nothing is counted twice."""
    found: Counter[str] = Counter()
    wanted = [*(MAIL if "@" in text else ()), *(NUMBERS if DIGITS.search(text) else ())]
    for kind, pattern, is_one in [*wanted, *(ADDRESSES if text.count(":") > 1 else ())]:
        matches = [match.span() for match in pattern.finditer(text) if is_one(match[0])]
        if matches:
            found[kind] += len(matches)
            ends = [(0, 0), *matches, (len(text), len(text))]
            text = " | ".join(text[end:start] for (_, end), (start, _) in pairwise(ends))
    return found


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others, as on every payment card."""
    total = 0
    for position, digit in enumerate(reversed(digits)):
        value = int(digit) * (1 + position % 2)
        total += value - 9 * (value > 9)
    return total % 10 == 0


def is_card(text: str) -> bool:
    digits = re.sub("[^0-9]", "", text)
    return 13 <= len(digits) <= 19 and len(set(digits)) > 1 and luhn(digits)


def is_iban(text: str) -> bool:
    """Whether a text, or its beginning up to a space, has the check digits of ISO 7064; words may follow a number."""
    groups = text.upper().split(" ")
    for last in range(len(groups), 0, -1):
        number = "".join(groups[:last])
        if len(number) < 15:
            return False
        if int("".join(str(int(sign, 36)) for sign in number[4:] + number[:4])) % 97 == 1:
            return True
    return False


def _is_ipv6(text: str) -> bool:
    try:
        IPv6Address(text)
    except ValueError:
        return False
    # A ratio such as 3::1 is an address too, of nobody.
    return max(map(len, text.split(":"))) > 2


def _is_ipv4(text: str) -> bool:
    return all(int(part) < 256 for part in text.split("."))


def _is_phone(text: str) -> bool:
    return 7 <= sum(map(str.isdigit, text)) <= 15


def _is_one(text: str) -> bool:
    """Whether a match counts where the pattern says it all."""
    return True


# What is looked for, in this order, in texts with an @, with digits, and with colons.
MAIL = (("e-mail addresses", EMAIL, _is_one),)
NUMBERS = (
    ("bank accounts (IBAN)", IBAN, is_iban),
    ("card numbers", CARD, is_card),
    ("social security numbers", SOCIAL_SECURITY, _is_one),
    ("national insurance numbers", NATIONAL_INSURANCE, _is_one),
    ("IP addresses", IPV4, _is_ipv4),
    ("phone numbers", PHONE, _is_phone),
)
ADDRESSES = (("IP addresses", IPV6, _is_ipv6),)
