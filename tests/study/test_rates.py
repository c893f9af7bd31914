import pytest

from fedmtl.errors import ConfigError
from fedmtl.study.rates import parse_numbers, parse_rates, rate_for


def test_the_last_rate_that_fits_a_name_counts():
    rates = parse_rates("tiny-*=1e-3, tiny-ag_news-*=2e-3")
    assert rate_for(rates, "tiny-imdb-8") == 1e-3
    assert rate_for(rates, "tiny-ag_news-8") == 2e-3
    assert rate_for(rates, "elsewhere", "tiny-imdb-8") == 1e-3
    assert rate_for(rates, "minilm-l6-imdb-8") is None


@pytest.mark.parametrize("text", ["federated", "=1e-4", "federated=fast", "federated=-1", "federated=nan"])
def test_a_rate_that_is_none_is_named(text):
    with pytest.raises(ConfigError, match=r"--rate: found"):
        parse_rates(text)


def test_numbers_are_above_zero():
    assert parse_numbers("5,0.5,5", "--alphas") == (5.0, 0.5)
    with pytest.raises(ConfigError, match="--alphas: found 5,0;"):
        parse_numbers("5,0", "--alphas")
