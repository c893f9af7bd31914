"""A run folder: its files, its events, its table of rounds, and what a run came to."""
