"""The same data and budget as a federation, in one place, and at each client alone."""
