"""Take a trained run, give back something to ship."""
