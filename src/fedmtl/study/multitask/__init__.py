"""The study of multi-task methods."""
