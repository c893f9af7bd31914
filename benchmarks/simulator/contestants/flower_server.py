"""Flower's simulation: the stock FedAvg over Ray actors of one core each.

`run_simulation` is used although deprecated: it starts sooner than `flwr run`, and leaves no server behind.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path

from simulator.contestants.telling import Round, tell


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--actors", type=int, required=True)
    args = parser.parse_args()
    os.environ["BENCH_WORKLOAD"], os.environ["BENCH_CLIENTS"] = str(args.workload), str(args.clients)

    from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from simulator.contestants.flower_client import app as client_app
    from simulator.contestants.network import Network, num_parameters

    class Timed(FedAvg):
        """The stock strategy, timed: a round runs from its configuration to its aggregate."""

        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            self.round = Round(server_round).__enter__()
            self.sent = _size(arrays)
            return super().configure_train(server_round, arrays, config, grid)

        def aggregate_train(
            self, server_round: int, replies: Iterable[Message]
        ) -> tuple[ArrayRecord | None, MetricRecord | None]:
            replies = list(replies)
            answers = [reply for reply in replies if reply.has_content()]
            aggregate = super().aggregate_train(server_round, replies)
            self.round.samples = sum(int(reply.content["metrics"]["num-examples"]) for reply in answers)
            received = sum(_size(reply.content["arrays"]) for reply in answers)
            self.round.megabytes = (self.sent * len(replies) + received) / 1e6
            self.round.__exit__(None, None, None)
            return aggregate

    def _size(arrays: ArrayRecord) -> int:
        return sum(len(array.data) for array in arrays.values())

    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: object) -> None:
        network = Network(args.workload / "encoder")
        tell("model", parameters=num_parameters(network))
        strategy = Timed(fraction_evaluate=0.0, min_train_nodes=args.clients, min_available_nodes=args.clients)
        strategy.start(grid=grid, initial_arrays=ArrayRecord(network.state_dict()), num_rounds=args.rounds)

    run_simulation(
        server_app,
        client_app,
        num_supernodes=args.clients,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
            "init_args": {"num_cpus": args.actors, "include_dashboard": False, "log_to_driver": False},
        },
    )


if __name__ == "__main__":
    main()
