"""More texts to distil with: copies of the given ones with some words replaced."""
