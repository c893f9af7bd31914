"""The local loop: objectives, optimizers, schedules, evaluation."""
