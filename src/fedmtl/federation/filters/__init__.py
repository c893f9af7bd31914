"""What happens to an update between training and averaging: one file per filter.

At a client the filters are called with the finished update, then it is encoded (`wire/`). At the server it is decoded,
then checked (`validate.py`), then the filters are called in the opposite order, and what they make of it is checked
once more. A filter that fails costs the client whose update it has.
"""
