"""BERT computed from its values alone: by autograd, by hand on a CPU, and for several clients at once."""
