"""The exceptions that hf_packing raises on purpose."""


class PackingError(ValueError):
    """A value that cannot be packed; the message names the argument, the value and what is accepted."""


class MissingDependencyError(ImportError):
    """A missing optional package; the message has the pip command that installs it."""


class ModelNotSupportedError(PackingError):
    """A model for which the isolation of packed documents cannot be verified; the message gives the reason."""
