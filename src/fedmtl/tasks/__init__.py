"""Task definitions, where their examples come from, how they are dealt to clients, and how they are scored."""
