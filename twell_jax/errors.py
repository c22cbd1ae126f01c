"""Errors that a user can put right; command lines show their message without a traceback."""


class UserError(ValueError):
    """Something given from outside is wrong: the message says what, and what is allowed."""


class ConfigError(UserError):
    """The configuration is wrong, or does not fit the data or the checkpoint."""


class DataError(UserError):
    """Prepared data is missing, damaged, or cannot be used as asked."""
