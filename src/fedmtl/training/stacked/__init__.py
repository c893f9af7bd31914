"""Several clients trained at once, as one batched computation."""
