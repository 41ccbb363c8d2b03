"""The parser of sft.py: flags and YAML files alike, nothing accepted and ignored."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sft_flags import RULE_OF, Refused
from trl import SFTConfig, TrlParser

NOT_GIVEN = object()
MAX_LENGTH = {"max_length": None}
"""Unlike in SFTConfig, whose 1024 would be ignored where it is given."""


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the flags that were given.

    Args:
        given: values by the names of flags, of the command line and of a YAML file, and no others.
    """
    for name in {each.name for each in fields(SFTConfig)} & given.keys():
        rule, value = RULE_OF.get(name), given[name]
        if rule is None:
            yield f"--{name}: expected none, since this recipe does not know what it would do here, got {value!r}"
        elif isinstance(rule, Refused):
            if not any(type(value) is type(each) and value == each for each in rule.accepted):
                expected = " or ".join(map(repr, rule.accepted)) or "none"
                yield f"--{name}: expected {expected}, got {value!r}: {rule.says}"
        elif rule.needs_eval_data and given.get("eval_data") is None and value not in (None, False, "no"):
            yield f"--{name}: expected --eval_data beside it, got {value!r} alone"


class Parser(TrlParser):
    """Refuses what the recipe cannot honour, and knows what was given.

    Args:
        of_recipe: the dataclass with the recipe's own flags.
        defaults: values of flags that are given nowhere.
    """

    def __init__(self, of_recipe: type, defaults: Mapping[str, Any]) -> None:
        super().__init__((of_recipe, SFTConfig), allow_abbrev=False)  # --packing_s would mean --packing_strategy
        self.set_defaults(**MAX_LENGTH, **defaults)
        self.given: dict[str, Any] = {}
        for action in self._actions:  # argparse has no public way to leave a flag out of --help
            rule = RULE_OF.get(action.dest)
            if isinstance(rule, Refused):
                action.help = argparse.SUPPRESS
                if not any(isinstance(value, int) for value in rule.accepted):
                    action.type, action.choices = str, None  # any value is refused for the same reason

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Also takes note of what the YAML file says."""
        self.given |= settings
        return super().set_defaults_with_config(**settings)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Looks at what is given before any of it has an effect."""
        nothing = argparse.Namespace(**{action.dest: NOT_GIVEN for action in self._actions})
        seen, _ = super().parse_known_args(args, nothing)
        self.given |= {name: value for name, value in vars(seen).items() if value is not NOT_GIVEN}
        if found := sorted(problems(self.given)):
            sys.exit("\n".join(found))
        return super().parse_known_args(args, namespace)
