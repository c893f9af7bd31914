"""The run folder: its files, its events, and what can be read out of them."""
