"""The exceptions that hf_packing raises on purpose."""


class PackingError(ValueError):
    """Raised for an unusable argument, setting or dataset; the message names the value and what is accepted."""


class MissingDependencyError(ImportError):
    """Raised if an optional package is missing; the message has the pip command that installs the package."""


class ModelNotSupportedError(PackingError):
    """Raised if it cannot be verified that a model keeps packed documents apart; the message gives the reason."""
