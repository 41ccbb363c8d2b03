"""Every exception that hf_packing raises on purpose."""


class PackingError(ValueError):
    """A value that cannot be packed; the message names the argument, the value and what is accepted."""


class MissingDependencyError(ImportError):
    """An optional package is needed and absent; the message is the pip line that installs it."""


class ModelNotSupportedError(PackingError):
    """A model that cannot be shown to keep packed documents apart; the message says why."""
