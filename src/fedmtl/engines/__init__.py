"""Carry Jobs to clients and Updates back."""
