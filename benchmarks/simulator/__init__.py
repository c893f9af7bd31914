"""This project beside other ways of doing the same work, timed in one run: `make bench`."""
