"""Capabilities, one file each: the server's half, the client's half, and the paper on top."""
