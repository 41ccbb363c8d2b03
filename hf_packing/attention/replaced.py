"""A forward that stands in the place of a module's own."""

from typing import Any

from torch import nn


class ReplacedForward:
    """What stands in place of a module's forward. A class, so that a patched model can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        found: Any = vars(module).get("forward")
        while isinstance(found, type(self)):
            found = found.before
        self.before: Any = found
        """What stood in the place of the class's forward, such as a hook of accelerate."""
        self.installed = False

    def install(self) -> None:
        self.module.forward = self  # type: ignore[assignment]  # subclasses can be called
        self.installed = True

    def remove(self) -> None:
        """Where somebody has put something over it since, it stays and does nothing from now on."""
        self.installed = False
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self.before is not None:
                self.module.forward = self.before

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)
