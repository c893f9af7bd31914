"""One config -> one run folder."""
