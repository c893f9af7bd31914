"""How the updates of a round become one delta: one file per rule.

A rule is a class that is made anew for every round, of the state before it and of what the rule of the last round
left. `add` is called with each accepted update in an order that does not depend on arrival, and with how much the
client counts in each of its scopes; `result` once, at the end. A rule that needs all updates at once may hold them:
their tensors lie in files, and are decoded when they are looked at (`WaitingUpdates`).
"""
