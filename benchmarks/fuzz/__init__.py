"""Mutated inputs for every decoder and reader: `python -m fuzz --help`, or `make fuzz`."""
