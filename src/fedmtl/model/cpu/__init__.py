"""BERT on a CPU: the forward and the backward pass written out, in memory that is kept from step to step."""
