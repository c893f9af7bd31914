"""The settings of what protects updates: noise on gradients, noise on updates, and sums that nobody can open."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedmtl.config.errors import WrongKey
from fedmtl.config.kinds import AsNumber, Count, Positive, Section, Share

# Half of all examples at most: a guarantee with a larger delta would allow for publishing some of them.
Delta = Annotated[float, Field(gt=0, lt=0.5, allow_inf_nan=False), AsNumber]


def check_one_of(section: Section, first: str, second: str) -> None:
    """Raise unless exactly one of two keys of a section is given."""
    given = [name for name in (first, second) if getattr(section, name) is not None]
    if len(given) != 1:
        found = "both" if given else "neither"
        raise WrongKey(second, f"found {found} of {first} and {second}; write one of them, the other follows from it")


class ExamplePrivacyConfig(Section):
    """Noise on the gradients of a client's steps, which hides single examples (DP-SGD). Empty is off."""

    epsilon: Positive | None = Field(
        None, description="The most that all rounds may spend for one example; the noise is found from it."
    )
    noise_multiplier: Positive | None = Field(
        None, description="The noise's standard deviation in units of max_grad_norm; epsilon follows from it."
    )
    delta: Delta = Field(1e-5, description="The delta of (epsilon, delta); well below 1 / examples of a client.")
    max_grad_norm: Positive = Field(1.0, description="The norm that the gradient of each example is clipped to.")
    max_sampling_rate: Share | None = Field(
        None,
        description="With noise_multiplier under privacy.secure_aggregation: the largest chance of an example to be in"
        " a step (batch size / examples) that a client may have. Epsilon is stated for it, as nobody tells what it has"
        " spent; a client that would spend more does not take part.",
    )
    sampling: Literal["poisson"] = Field(
        "poisson",
        description="How the examples of a step are drawn: each by itself with the same chance, which is what the"
        " accountant assumes. The expected number is the batch size.",
    )
    examples_at_once: Count | None = Field(
        None,
        description="Examples of a step that are computed at once, where memory does not hold all of a step; empty is"
        " twice the batch size, at most 256.",
    )

    @model_validator(mode="after")
    def _is_given_one_target(self) -> Self:
        check_one_of(self, "epsilon", "noise_multiplier")
        if self.max_sampling_rate is not None and self.noise_multiplier is None:
            raise WrongKey(
                "max_sampling_rate", "found with epsilon, which is what is stated of every client; leave it out"
            )
        return self


class AdaptiveClippingConfig(Section):
    """A bound that follows a quantile of the clients' norms (Andrew et al. 2021). Empty is a fixed bound."""

    quantile: Share = Field(0.5, description="The share of clients whose update shall not be clipped.")
    learning_rate: Positive = Field(0.2, description="How fast the bound follows, as a power of e.")
    count_noise: Positive | None = Field(
        None,
        description="Standard deviation of the noise on the number of clients below the bound, which is part of what is"
        " spent; empty is a twentieth of a round's expected clients, and at least the noise multiplier.",
    )


class ClientPrivacyConfig(Section):
    """Noise on the sum of updates, which hides whole clients (DP-FedAvg). Empty is off."""

    epsilon: Positive | None = Field(
        None, description="The most that all rounds may spend for one client; the noise is found from it."
    )
    noise_multiplier: Positive | None = Field(
        None, description="The noise's standard deviation in units of max_norm; epsilon follows from it."
    )
    delta: Delta = Field(1e-5, description="The delta of (epsilon, delta); well below 1 / number of clients.")
    max_norm: Positive = Field(1.0, description="The norm that each client's update is clipped to.")
    bound: Literal["together", "by_scope"] = Field(
        "together",
        description="One bound over all scopes of an update, or one for each scope, with max_norm divided among them.",
    )
    sampling_rate: Share = Field(
        1.0,
        description="Every client takes part in a round by itself with this chance (Poisson), which the accountant"
        " counts: who sees the model does not know who did. It stands in for federation.clients_per_round.",
    )
    noise_at: Literal["server", "clients"] = Field(
        "server",
        description="Who adds the noise: the server, which must be trusted with single updates; or `clients`, each"
        " its part of it under privacy.secure_aggregation.",
    )
    adaptive_clipping: AdaptiveClippingConfig | None = Field(
        None, description="Let max_norm follow a quantile of the clients' norms; `{}` turns it on, empty is off."
    )

    @model_validator(mode="after")
    def _is_given_one_target(self) -> Self:
        check_one_of(self, "epsilon", "noise_multiplier")
        return self


class SecureAggregationConfig(Section):
    """Sums of updates that the server can open only as sums (Bonawitz et al. 2017). Empty is off."""

    threshold: Share = Field(
        2 / 3,
        description="The share of a round's clients that must stay to its end, more than a half; more dropouts end the"
        " round. Where fewer than 2 * threshold - 1 of the clients and the server work together, they open nothing but"
        " sums.",
    )
    bits: Literal[32, 64] = Field(32, description="Bits of a masked number; 64 doubles the bytes and the precision.")
    max_value: Positive = Field(
        1.0, description="Entries of an update are cut to this size before they become whole numbers."
    )

    @model_validator(mode="after")
    def _needs_more_than_half(self) -> Self:
        if self.threshold <= 0.5:
            raise WrongKey(
                "threshold",
                f"found {self.threshold:g}, and with half of the clients a server could have both secrets of one given"
                " out; write more than 0.5",
            )
        return self


class PrivacyConfig(Section):
    """What protects updates, beside what a site's policy refuses."""

    example: ExamplePrivacyConfig | None = Field(
        None, description="Noise on gradients, which hides single examples; empty is off."
    )
    client: ClientPrivacyConfig | None = Field(
        None, description="Noise on sums of updates, which hides whole clients; empty is off."
    )
    secure_aggregation: SecureAggregationConfig | None = Field(
        None, description="The server sees sums of updates alone; `{}` turns it on with its defaults, empty is off."
    )
    min_clients: Count = Field(
        3, description="With secure_aggregation, the fewest clients whose updates may be summed and opened."
    )

    @model_validator(mode="after")
    def _sums_over_several(self) -> Self:
        if self.secure_aggregation is not None and self.min_clients < 2:
            raise WrongKey("min_clients", "found 1, and a sum over one client is its update; write 2 or more")
        example = self.example
        if example is not None and example.noise_multiplier is not None:
            has_bound, is_masked = example.max_sampling_rate is not None, self.secure_aggregation is not None
            if is_masked and not has_bound:
                raise WrongKey(
                    "example.max_sampling_rate",
                    "found nothing, and under privacy.secure_aggregation no client tells what it has spent; write the"
                    " largest chance of an example to be in a step (batch size / examples) of any client, or give"
                    " privacy.example.epsilon in place of noise_multiplier",
                )
            if has_bound and not is_masked:
                raise WrongKey(
                    "example.max_sampling_rate",
                    f"found {example.max_sampling_rate:g} without privacy.secure_aggregation, where each client's"
                    " chance is counted as it is; leave it out",
                )
        return self
