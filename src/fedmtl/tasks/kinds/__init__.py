"""One file for each kind of task: everything that depends on what is predicted."""
