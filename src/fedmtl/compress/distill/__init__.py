"""A finished run made into a smaller model with the same tasks."""
