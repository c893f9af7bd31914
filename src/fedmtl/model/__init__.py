"""The shared encoder with its heads, what may be added to it, and models on disk."""
