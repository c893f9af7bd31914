"""What leaves a client with noise, and what the noise comes to."""

from __future__ import annotations

from fedmtl.report.formats import count
from fedmtl.report.markup import Html, notes, table, tag
from fedmtl.report.outline import section
from fedmtl.report.record import Run
from fedmtl.runs.privacy import rounded_up

NONE = (
    "No noise was added: an update is the difference of the values that a client trained, and the server saw each by"
    " itself. No guarantee of differential privacy holds."
)
GUIDE = (
    "Every example's gradient was clipped by itself and noise was added at the client, before anything left it. Each"
    " row is the client where most was spent: how many steps it made, the chance of an example to be in one, and the"
    " noise in units of the clipping norm. Epsilon follows from these alone."
)


def privacy(run: Run) -> Html:
    found = run.example_privacy
    if found is None:
        return section("privacy", tag("p", NONE, class_="guide"))
    rows = []
    for task, one in found.tasks.items():
        if one.accountant == "bound":
            rows.append(
                (
                    task, rounded_up(one.epsilon), f"{found.delta:g}", rounded_up(one.epsilon_rdp), "each, at most",
                    f"of {count(one.jobs or 0)} jobs", "its own", "its own", ", ".join(one.scopes),
                )
            )  # fmt: skip
        for release in one.releases:
            rows.append(
                (
                    task, rounded_up(one.epsilon), f"{found.delta:g}", rounded_up(one.epsilon_rdp),
                    one.client or "each, at most",
                    count(release.times), f"{release.chance:.4g}", f"{release.noise_multiplier:.4g}",
                    ", ".join(one.scopes),
                )
            )  # fmt: skip
    head = ("Task", "epsilon", "delta", "bound (Renyi)", "Client", "Steps", "Chance", "Noise", "Scopes with noise")
    caption = f"Spent until round {found.round}; gradients were clipped to {found.max_grad_norm:g}"
    spent = table(caption, head, rows, words={4, 8})
    return section("privacy", tag("p", GUIDE, class_="guide"), spent, notes(run.privacy))
