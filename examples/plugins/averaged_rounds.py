"""An average of rounds (Polyak and Juditsky 1992), a server method of another package.

    import averaged_rounds                         # registers it
    fedmtl.run({"tasks": {...}, "methods": {"averaged_rounds": {"momentum": 0.9}}})

After every round the server's weights become a moving average of all rounds so far. Clients go on from the average.
"""

from dataclasses import replace

from pydantic import BaseModel, ConfigDict, Field

from fedmtl import Capability, Extra, OtherEvent, ServerMethod, ServerSetup, State, Step, options_of, register


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    momentum: float = Field(0.5, ge=0, lt=1)


class AveragedRounds(ServerMethod):
    name = "averaged_rounds"

    def __init__(self, setup: ServerSetup) -> None:
        self._momentum = options_of(setup.config, self.name).momentum

    def after_aggregation(self, before: State, after: State) -> Step:
        moved = {
            key: value + self._momentum * (before.weights[key] - value) if key in before.weights else value
            for key, value in after.weights.items()
        }
        event = OtherEvent(name=self.name, unknown={"round": after.round, "momentum": self._momentum})
        return Step(replace(after, weights=moved), (event,))

    def check(self, extra: Extra) -> None:
        assert not extra


register(Capability("averaged_rounds", server=AveragedRounds, options=Options))
