"""The exception classes of hf_packing."""


class PackingError(ValueError):
    """The error for an argument, a setting or a dataset that cannot be used. The message says what is accepted."""


class MissingDependencyError(ImportError):
    """The error for a missing optional package. The message has the pip command that installs the package."""


class ModelNotSupportedError(PackingError):
    """The error for a model in which packed documents may affect each other. The message gives the reason."""
