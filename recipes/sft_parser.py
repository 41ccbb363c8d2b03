"""The parser of sft.py: flags and YAML files alike, nothing accepted and ignored."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from sft_flags import BY_RECIPE, RULE_OF, Refused
from trl import SFTConfig, TrlParser

NOT_GIVEN = object()
HELP_WIDTH = 110
MOST_CHOICES = 6
"""Longer lists of choices are not printed in --help."""
MAX_LENGTH = {"max_length": None}
"""The recipe's default, instead of SFTConfig's 1024, which TRL would apply to packed rows."""


def problems(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the flags that were given.

    Args:
        given: values of the flags given on the command line or in a YAML file, by name; no defaults.
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
    """Parse flags, refuse those that the recipe cannot honor, and keep what was given.

    Args:
        of_recipe: the dataclass with the recipe's own flags.
        defaults: values of flags that are not given.
    """

    def __init__(self, of_recipe: type, defaults: Mapping[str, Any]) -> None:
        usage = "sft.py --data DATA --model MODEL [--config FILE.yaml] [flags]"
        # with allow_abbrev, --packing_s would mean --packing_strategy
        super().__init__((of_recipe, SFTConfig), usage=usage, allow_abbrev=False)
        self.set_defaults(**MAX_LENGTH, **defaults)
        self.given: dict[str, Any] = {}
        self._own = {each.name for each in fields(of_recipe)}
        for action in self._actions:  # argparse has no public way to leave a flag out of --help
            rule = RULE_OF.get(action.dest)
            if isinstance(rule, Refused):
                action.help = argparse.SUPPRESS
                if not any(isinstance(value, int) for value in rule.accepted):
                    action.type, action.choices = str, None  # any value is refused for the same reason

    def format_help(self) -> str:
        """Return the help in three parts, the recipe's own flags first, each flag in one spelling."""
        said = {name: rule.says for rule in BY_RECIPE for name in rule.names}
        parts: dict[str, list[argparse.Action]] = {
            "flags of this recipe": [],
            "flags of TRL's SFTConfig that this recipe handles itself": [],
            "flags of TRL's SFTConfig that TRL handles": [],
        }
        own, by_recipe, by_trl = parts.values()
        for action in self._actions:
            part = own if action.dest in {"help", *self._own} else by_recipe if action.dest in said else by_trl
            part.append(_in_short(action, said.get(action.dest)))
        formatter = self.formatter_class(prog=self.prog, width=HELP_WIDTH)
        formatter.add_usage(self.usage, [], [])
        for title, actions in parts.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        return formatter.format_help()

    def set_defaults_with_config(self, **settings: Any) -> list[str]:
        """Also keep what the YAML file gives."""
        self.given |= settings
        return super().set_defaults_with_config(**settings)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Check all that is given before any of it takes effect."""
        nothing = argparse.Namespace(**{action.dest: NOT_GIVEN for action in self._actions})
        seen, _ = super().parse_known_args(args, nothing)
        self.given |= {name: value for name, value in vars(seen).items() if value is not NOT_GIVEN}
        if found := sorted(problems(self.given)):
            sys.exit("\n".join(found))
        return super().parse_known_args(args, namespace)


def _in_short(action: argparse.Action, said: str | None) -> argparse.Action:
    """Return a copy of a flag for --help, with one spelling and without long lists of choices."""
    action = copy.copy(action)
    action.option_strings = [name for name in action.option_strings if name.startswith("--")][:1]
    if action.choices is None or len(list(action.choices)) > MOST_CHOICES:
        action.metavar = action.metavar or "VALUE"
        action.choices = None
    if said is not None:
        action.help = said.replace("`", "").replace("%", "%%")
    return action
