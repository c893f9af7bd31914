"""Many runs of one config -> tables and pictures."""
