"""BERT on a CPU: the forward and the backward pass are written out, in memory that passes use again."""
