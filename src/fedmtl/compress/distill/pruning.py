"""Pruning while distilling: the student's smallest weights become zero while it learns, and stay zero.

The rules are those of `training.pruning` in a federation (methods/pruning.py), with a pass over the examples where a
federation has a round; passes are counted through both stages.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fedmtl.compress.distill.settings import DistillSettings
from fedmtl.compress.distill.student import Student
from fedmtl.config import PruningConfig
from fedmtl.errors import ConfigError
from fedmtl.federation.messages import State
from fedmtl.methods.pruning import MASK, NAME, PrunedClient, Pruning, prunable_names, pruned_weights
from fedmtl.model.multitask import BoundModel
from fedmtl.runs.event_lines import Event
from fedmtl.sharing.plan import NO_EXTRA, Extra, Key, Weights
from fedmtl.sharing.weights import linear_weights
from fedmtl.training.local_method import LocalClient, LocalMethods


def check_pruning(pruning: PruningConfig | None, settings: DistillSettings) -> None:
    """Raise a ConfigError where the passes end before the share of zeros is reached."""
    passes = sum(settings.epochs.values())
    if pruning is not None and pruning.start_round + pruning.rounds - 1 > passes:
        raise ConfigError(
            f"training.pruning.rounds: found {pruning.rounds} from start_round {pruning.start_round}; a pass is a round"
            f" here, and there are {passes}: write fewer, or give more --epochs-intermediate or --epochs-prediction"
        )


class StudentPruning:
    """The masks of the student, and the two halves that a federation has: who decides, and who keeps to it.

    Without settings nothing is pruned.
    """

    def __init__(self, settings: PruningConfig | None, student: Student) -> None:
        self._plan, self._extra = student.plan, NO_EXTRA
        self._decides: Pruning | None = None
        self._follows = PrunedClient({})
        if settings is not None:
            linear = linear_weights(student.model)
            self._decides = Pruning(settings, prunable_names(settings, student.plan, linear), frozenset(linear))

    @property
    def methods(self) -> LocalMethods:
        """What the optimizer has to call at each step."""
        return LocalMethods([self._follows] if self._decides is not None else [])

    @property
    def masks(self) -> Mapping[Key, Tensor]:
        """True where a weight stays zero."""
        return self._extra.slot(MASK)

    def restore(self, masks: Mapping[Key, Tensor]) -> None:
        """Go on with the masks of a checkpoint."""
        self._extra = Extra(tensors={MASK: dict(masks)}) if masks else NO_EXTRA

    def begin(self, weights: Weights) -> tuple[Weights, tuple[Event, ...]]:
        """The weights before the first pass, pruned if `start_round` is 0, and the event that says so."""
        if self._decides is None:
            return weights, ()
        state = self._decides.start(State(0, weights, self._plan)).state
        self.restore(pruned_weights(state))
        return dict(state.weights), self._decides.report(state)

    def bind(self, bound: BoundModel) -> None:
        """Hold the bound values, and from now on their gradients, to the masks."""
        self._follows.start(LocalClient(bound, {}, bound.flat.values.device, seed=0, round=0), self._extra, NO_EXTRA)

    def after_pass(self, number: int, bound: BoundModel) -> tuple[Event, ...]:
        """Prune what is due after the pass, in the bound values, and return the event that says how sparse they are."""
        if self._decides is None:
            return ()
        weights = {key: value.cpu().clone() for key, value in bound.weights().items()}
        before = State(number, weights, self._plan, extra={NAME: self._extra})
        after = self._decides.after_aggregation(before, before).state
        self.restore(pruned_weights(after))
        self.bind(bound)
        return self._decides.report(after)
