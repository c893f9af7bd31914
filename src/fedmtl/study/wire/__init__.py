"""The study of what travels."""
