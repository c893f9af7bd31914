"""The study of compression."""
