"""What a statement of privacy says of a run that did not end well."""

from __future__ import annotations

import pytest

from fedmtl.runs.event_lines import Event
from fedmtl.runs.events import EndEvent, ExamplePrivacyEvent, ExampleSpending, PrivacyEvent, ReleaseFacts, RoundEvent
from fedmtl.runs.privacy import privacy_lines
from fedmtl.runs.summary import protection

ONE = {"chance": 0.5, "noise_multiplier": 1.0, "times": 4}
SPENT = ExampleSpending(
    epsilon=1.0, epsilon_rdp=1.0, accountant="pld", client="a", releases=[ReleaseFacts(**ONE)], clients=1,
    scopes=["all"], unconfirmed=0, unknown=0,
)  # fmt: skip
OF_EXAMPLES = ExamplePrivacyEvent(round=3, delta=1e-5, max_grad_norm=1.0, tasks={"x": SPENT})
OF_CLIENTS = PrivacyEvent(
    round=3, unit="client", epsilon=1.0, delta=1e-5, accountant="pld", releases=[ONE], words="client-level", details={}
)


def end(status: str) -> EndEvent:
    return EndEvent(status=status, rounds=3)


@pytest.mark.parametrize("stated", [OF_EXAMPLES, OF_CLIENTS])
def test_a_round_in_which_the_run_ended_is_named_as_missing(stated: Event) -> None:
    def lines(*events: Event) -> str:
        return "\n".join([*privacy_lines([stated, *events]), *protection([stated, *events])])

    missing = "the run ended within round 4, of which the statement has nothing"
    assert missing in lines(end("failed"))
    assert missing in lines(end("interrupted"))
    assert missing not in lines(end("done"))
    # It went on, and has round 4 now.
    assert missing not in lines(end("failed"), RoundEvent(round=4))
    assert protection([end("failed")]) == []
