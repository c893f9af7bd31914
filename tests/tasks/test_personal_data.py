"""What is taken for personal data, and what is not. All numbers are published examples or made here."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedmtl.tasks.personal_data import is_card, is_iban, luhn, may_have_personal_data, personal_data


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("write to jane.doe@example.org.", "e-mail addresses"),
        ("call +44 20 7946 0958 now", "phone numbers"),
        ("call (212) 555-0123", "phone numbers"),
        ("call 212-555-0123", "phone numbers"),
        ("Tel. 030 1234567", "phone numbers"),
        ("to GB82 WEST 1234 5698 7654 32 and not later", "bank accounts (IBAN)"),
        ("to de89370400440532013000", "bank accounts (IBAN)"),
        ("card 4111 1111 1111 1111", "card numbers"),
        ("card 378282246310005", "card numbers"),
        ("ssn 078-05-1120", "social security numbers"),
        ("nino AB 12 34 56 C", "national insurance numbers"),
        ("from 192.168.0.17", "IP addresses"),
        ("from 2001:db8::ff00:42:8329", "IP addresses"),
    ],
)
def test_a_text_with_one_of_a_kind_counts_it_once_and_nothing_else(text, kind):
    assert personal_data(text) == {kind: 1}
    assert may_have_personal_data(text)


@pytest.mark.parametrize(
    "text",
    [
        "a text without anything",
        "the score was 3-2 in 1998, and 10,000 came",
        "at 12:30:45 on 2024-05-17",
        "version 1.2.3 and 300.1.2.3",
        "ssn 000-12-3456 and 666-12-3456 and 912-34-5678 are none",
        "card 4111 1111 1111 1112",
        "GB82 WEST 1234 5698 7654 33",
        "0000 0000 0000 0000",
        "me@home",
        "ratio 3::1",
    ],
)
def test_a_text_without_any_counts_nothing(text):
    assert not personal_data(text)


@given(st.text(alphabet="0123456789", min_size=12, max_size=18))
def test_exactly_one_last_digit_makes_a_number_pass_luhn(digits):
    assert sum(luhn(digits + last) for last in "0123456789") == 1


@given(st.text(alphabet="0123456789", min_size=13, max_size=19), st.integers(0, 18), st.integers(1, 9))
def test_a_changed_digit_never_passes_luhn(digits, position, change):
    position %= len(digits)
    changed = str((int(digits[position]) + change) % 10)
    assert not (luhn(digits) and luhn(digits[:position] + changed + digits[position + 1 :]))


def test_several_in_one_text_count_each():
    assert personal_data("a@example.org, b@example.org; 212-555-0123") == {"e-mail addresses": 2, "phone numbers": 1}


def test_a_text_of_a_hundred_thousand_addresses_is_counted_at_once():
    assert personal_data("a@b.co " * 100_000) == {"e-mail addresses": 100_000}


def test_luhn_by_hand():
    # From the right: 3, 2*2=4, 6, 1*2=2 -> 3 + 4 + 6 + 2 = 15; with 8 for the last digit 20.
    assert not luhn("1623")
    assert luhn("1628")
    assert is_card("4000-0000-0000-0002")
    assert not is_card("4000-0000-0000-0003")


@given(st.text(alphabet="0123456789", min_size=14, max_size=14))
def test_an_iban_of_97_check_numbers_passes_with_one(account):
    # Two check digits, 02 to 98, of which one leaves the remainder 1.
    assert sum(is_iban(f"GB{check:02d}WEST{account}") for check in range(2, 99)) == 1


@given(st.text())
def test_any_text_is_counted_without_an_error_and_the_quick_look_misses_nothing(text):
    assert may_have_personal_data(text) or not personal_data(text)
