"""A coordinate-wise median of updates (Yin et al. 2018), as an aggregation rule of another package.

    import median                                  # registers it
    fedmtl.run({"tasks": {...}, "federation": {"aggregation": "median"}})

Every value moves by the median over the clients that returned it. Token rows that a client does not use count as zero.
"""

from collections.abc import Mapping

from torch import Tensor

from fedmtl import Aggregator, Capability, Extra, Key, Update, WaitingUpdates, register


class Median(Aggregator):
    def __init__(self, before: dict[Key, Tensor], extra: Extra) -> None:
        self._waiting = WaitingUpdates(before)

    def add(self, update: Update, weights: Mapping[str, float]) -> None:
        self._waiting.add(update, weights)

    def result(self) -> dict[Key, Tensor]:
        return {key: self._waiting.deltas(key)[0].median(dim=0).values for key in self._waiting.keys()}  # noqa: SIM118

    def remember(self) -> Extra:
        return Extra()


register(Capability("median", aggregator=Median))
