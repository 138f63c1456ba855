"""Every error a user can cause. The command line prints these as one line; anything else is a bug and keeps its traceback."""


class QkvError(Exception):
    """Base of all errors that are somebody's input, not our bug."""


class ConfigError(QkvError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class RequestError(QkvError, ValueError):
    """One request cannot be served (empty, out of vocabulary, too long); other requests are unaffected."""


class ModelError(QkvError, ValueError):
    """The model cannot be found, read, or run through the paged cache."""


class ScaleError(QkvError, ValueError):
    """A scale file is missing, incomplete, damaged, or belongs to another model."""
