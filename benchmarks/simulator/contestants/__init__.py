"""What is timed against this project. Each runs in an environment that need not have fedmtl installed."""
