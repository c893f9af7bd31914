"""A client's update on its way out, through the filters that its codecs name."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmtl.capabilities import update_filters
from fedmtl.federation.filters.protocol import FilterClient
from fedmtl.federation.messages import Codecs, Job, Update
from fedmtl.federation.wire import encode_delta
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Rows, SharingPlan

PLAN = SharingPlan((("*", "all"),))


def leave(
    delta: Mapping[Key, Tensor], codecs: Codecs, stored: Extra = NO_EXTRA, rows: Rows | None = None
) -> tuple[Mapping[Key, Tensor], Extra]:
    """The delta as it is sent, and what the last filter stores; the token table is called `table`."""
    job = Job("train", 1, "me", ("a",), {}, PLAN, rows, 0, 0, {}, codecs=codecs)
    update = Update(1, "me", ("a",), delta, rows, {"a": 1}, {})
    for each in update_filters({}, codecs.filters):
        update, stored = each.at_client(update, FilterClient(job, stored, "table"))
    return encode_delta(update.delta, codecs), stored
