"""Who shares which value: keys, the sharing plan, vocabulary rows, and the weights of a plan."""
