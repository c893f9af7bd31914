import dp_accounting as dp
import pytest

from fedmtl.errors import ConfigError
from fedmtl.methods.accounting import MOST_NOISE, Releases, noise_for, spent, together


def by_hand(*done: tuple[float, float, int], delta: float, interval: float = 1e-4) -> float:
    """The accountant called step by step, without any of the code under test."""
    relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    accountant = dp.pld.PLDAccountant(relation, value_discretization_interval=interval)
    for chance, noise, times in done:
        event = dp.PoissonSampledDpEvent(chance, dp.GaussianDpEvent(noise)) if chance < 1 else dp.GaussianDpEvent(noise)
        accountant.compose(event, times)
    return accountant.get_epsilon(delta)


def test_what_is_spent_is_what_googles_accountant_says():
    releases = [Releases(0.02, 1.0, 30), Releases(1.0, 4.0, 2), Releases(0.02, 1.0, 20)]

    found = spent(releases, 1e-5)

    done = (0.02, 1.0, 50), (1.0, 4.0, 2)
    assert found.epsilon == pytest.approx(by_hand(*done, delta=1e-5), rel=1e-9)
    # Ten times finer, its default, it says a little less.
    fine = by_hand(*done, delta=1e-5)
    assert fine <= found.epsilon <= 1.001 * fine
    assert found.epsilon <= found.epsilon_rdp * 1.001
    assert found.delta == 1e-5


def test_one_gaussian_release_of_everybody_is_near_its_closed_form():
    # Balle and Wang 2018, theorem 8: delta = Phi(1/(2s) - e*s) - exp(e) Phi(-1/(2s) - e*s).
    from math import exp

    from scipy.stats import norm

    sigma = 2.0
    epsilon = spent([Releases(1.0, sigma, 1)], 1e-5).epsilon
    delta = norm.cdf(0.5 / sigma - epsilon * sigma) - exp(epsilon) * norm.cdf(-0.5 / sigma - epsilon * sigma)

    assert delta == pytest.approx(1e-5, rel=2e-2)


def test_nothing_released_spends_nothing():
    assert spent([], 1e-5).epsilon == 0.0


def test_releases_that_are_alike_are_counted_together():
    assert together([Releases(0.5, 1.0, 2), Releases(0.1, 1.0, 1), Releases(0.5, 1.0, 3)]) == (
        Releases(0.1, 1.0, 1),
        Releases(0.5, 1.0, 5),
    )


@pytest.mark.parametrize(("epsilon", "chance", "times"), [(3.0, 0.05, 60), (8.0, 1.0, 5)])
def test_the_noise_that_is_found_keeps_to_epsilon_and_a_little_less_does_not(epsilon, chance, times):
    noise = noise_for(epsilon, 1e-5, chance, times)

    assert by_hand((chance, noise, times), delta=1e-5) <= epsilon
    assert by_hand((chance, noise * 0.995, times), delta=1e-5) > epsilon


def test_an_epsilon_that_no_noise_reaches_is_one_line():
    with pytest.raises(ConfigError, match=r"epsilon: found 1e-06, which no noise reaches"):
        noise_for(1e-6, 1e-9, 1.0, 10**6)


def test_noise_that_promises_nothing_is_accounted_without_gigabytes():
    assert spent([Releases(1.0, 0.01, 100)], 1e-5).epsilon > MOST_NOISE


@pytest.mark.parametrize(
    "values",
    [
        {"chance": 0.0, "noise_multiplier": 1.0, "times": 1},
        {"chance": 1.5, "noise_multiplier": 1.0, "times": 1},
        {"chance": 0.5, "noise_multiplier": 0.0, "times": 1},
        {"chance": 0.5, "noise_multiplier": float("nan"), "times": 1},
        {"chance": 0.5, "noise_multiplier": 1.0, "times": 0},
        {"chance": 0.5, "noise_multiplier": 1.0, "times": True},
        {"chance": 0.5, "noise_multiplier": 1.0, "times": 1, "more": 1},
    ],
)
def test_what_are_no_releases_is_refused(values):
    with pytest.raises(ValueError, match="no releases"):
        Releases.from_dict(values)


def test_releases_survive_a_file():
    releases = Releases(0.25, 1.5, 7)

    assert Releases.from_dict(releases.to_dict()) == releases
