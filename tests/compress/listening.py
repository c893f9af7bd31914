"""What tests of distillation and pretraining share: somebody who listens, and an end after so many passes."""

from fedmtl.compress.distill import work


class Listener:
    """Records what is said and shown."""

    def __init__(self):
        self.lines, self.updates = [], []

    def say(self, line):
        self.lines.append(line)

    def advance(self, stage, done, total):
        pass

    def update(self, update):
        self.updates.append(update)


def end_after(passes, monkeypatch):
    """Let a distillation be interrupted once it has made so many passes."""
    real, done = work.train_epoch, []

    def ended(*given):
        if len(done) == passes:
            raise KeyboardInterrupt
        done.append(1)
        return real(*given)

    monkeypatch.setattr(work, "train_epoch", ended)
