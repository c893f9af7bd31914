"""Federated multi-task learning for text: one shared encoder, one head per task, many owners of data."""

__version__ = "0.1.0"
