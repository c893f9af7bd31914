"""The study of scaling: the same examples, divided among ever more clients."""
