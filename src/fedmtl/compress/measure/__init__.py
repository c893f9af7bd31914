"""What one model costs: its size, its work and its time."""
