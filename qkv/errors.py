"""Every error that a user can cause. The command line prints them as one line. Other exceptions are bugs and keep their
traceback."""


class QkvError(Exception):
    """The base of all errors that come from what a user gave us."""


class ConfigError(QkvError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class RequestError(QkvError, ValueError):
    """One request cannot be served: it is empty, has unknown token ids or is too long. Other requests go on."""


class ClosedError(QkvError, RuntimeError):
    """The engine was closed, before the call or while it waited."""


class ModelError(QkvError, ValueError):
    """The model cannot be found, read, or run through the paged cache."""


class ScaleError(QkvError, ValueError):
    """A scale file is missing, incomplete, damaged, or belongs to another model."""
