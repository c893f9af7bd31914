"""The exceptions a user may meet; each message says what is wrong, where, and what to do."""


class FedmtlError(Exception):
    """The base of every error we raise on purpose. A user sees its message as one line."""

    exit_code = 2


class ConfigError(FedmtlError):
    """A config key is unknown, has a wrong value, or does not fit another one."""


class DataError(FedmtlError):
    """A file, a column, a label or a text is not what the task needs."""


class ModelError(FedmtlError):
    """An encoder cannot be found, built, or used the way the config asks."""


class RunNotFound(FedmtlError):
    """No run folder has that name."""


class WireError(FedmtlError):
    """Bytes that came over the wire are not a message of ours."""


class CannotContinue(FedmtlError):
    """The run has to end: too few clients are left, or every update was refused."""

    exit_code = 3
