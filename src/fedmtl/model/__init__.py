"""The shared encoder with its heads, the sharing plan, and slices of both."""
