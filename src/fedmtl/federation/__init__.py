"""Jobs out, updates back, averages between: the server loop and its client."""
