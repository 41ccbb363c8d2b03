"""How recipes/sft.py parses flags: each is in the table, honored or refused, on the command line and in YAML."""

from dataclasses import MISSING, fields, make_dataclass
from pathlib import Path

import pytest
import sft
import sft_flags
import sft_parser
import yaml
from recipe_inputs import exits
from sft_flags import BY_RECIPE, BY_TRAINER, REFUSED, RULE_OF, RULES
from trl import SFTConfig

pytestmark = pytest.mark.filterwarnings("default::FutureWarning")  # TRL uses names that transformers has renamed


def parsed(*flags, **settings):
    """The configuration that flags, and settings of a YAML file, make."""
    parser = sft_parser.Parser(sft.Arguments, {"use_cpu": True, "bf16": False})
    parser.set_defaults_with_config(**settings)
    return parser.parse_args_into_dataclasses(["--data", "d", "--model", "m", *map(str, flags)])[1]


def default_of(field):
    return field.default_factory() if field.default_factory is not MISSING else field.default


FIELDS = {field.name: field for field in fields(SFTConfig) if field.init}


def test_every_flag_of_trl_is_in_the_table():
    unknown = sorted(FIELDS.keys() - RULE_OF.keys())
    assert not unknown, (
        f"SFTConfig has new fields: {', '.join(unknown)}. Find out what each does in recipes/sft.py, put it into "
        "recipes/sft_flags.py as honored (with a test) or refused, and run python recipes/sft_flags.py"
    )
    assert sum(len(rule.names) for rule in RULES) == len(RULE_OF), "a flag is in the table twice"


def test_the_table_of_the_page_is_that_of_the_recipe():
    page = sft_flags.README.read_text()
    assert page == sft_flags.with_table(page), "run python recipes/sft_flags.py"


def test_a_flag_that_is_new_upstream_is_refused(monkeypatch):
    newer = make_dataclass("SFTConfig", [("brand_new", int, 0)], bases=(SFTConfig,))
    monkeypatch.setattr(sft_parser, "SFTConfig", newer)
    assert "--brand_new: expected none, since this recipe does not know" in exits(parsed, "--brand_new", 3)


REFUSED_FLAGS = [name for rule in REFUSED for name in rule.names]


@pytest.mark.parametrize("name", [name for name in REFUSED_FLAGS if name in FIELDS])
def test_refused(name):
    """Whatever would have no effect, or another one; on the command line, and in a YAML file."""
    rule = RULE_OF[name]
    values = {bool: not (rule.accepted or (None,))[0], int: 3, float: 3, str: "x"}
    kind = next((each for each in values if each.__name__ in str(FIELDS[name].type)), str)
    for given in ([], [f"--{name}"]):
        value = values[kind] if name != "dataset_kwargs" else '{"a": 1}'
        said = exits(parsed, *(given and [*given, value]), **({} if given else {name: value}))
        assert f"--{name}: expected " in said
        assert rule.says in said
    for value in rule.accepted:
        assert parsed(**{name: value})
    default = default_of(FIELDS[name])
    if default not in rule.accepted and not isinstance(default, list):
        assert f"--{name}: expected" in exits(parsed, **{name: default}), "given, even if it is the default"


def test_refused_flags_are_not_offered(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    offered = set(capsys.readouterr().out.replace(",", " ").split())
    assert "--resume_from_checkpoint" in offered
    assert not {f"--{name}" for name in REFUSED_FLAGS} & offered


def test_help_has_each_flag_once_and_the_recipes_own_first(capsys):
    with pytest.raises(SystemExit):
        parsed("--help")
    shown = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    own = [f"--{field.name}" for field in fields(sft.Arguments)]
    assert shown[: len(own) + 1] == ["--help", *own]
    honored = [f"--{name}" for rule in (*BY_RECIPE, *BY_TRAINER) for name in rule.names if name in FIELDS]
    assert set(honored) <= set(shown)
    assert len(shown) == len(set(shown)) > len(own) + 20


def other_value(name):
    """One that a flag may have, and that is not its default."""
    known = {
        "bf16": True,
        "dataloader_multiprocessing_context": "fork",
        "dataloader_num_workers": 2,
        "dataloader_pin_memory": True,
        "debug": "underflow_overflow",
        "eval_steps": 7,
        "eval_strategy": "epoch",
        "gradient_checkpointing": False,
        "hub_strategy": "end",
        "include_num_input_tokens_seen": True,
        "log_level": "error",
        "log_level_replica": "error",
        "logging_strategy": "epoch",
        "loss_type": "dft",
        "lr_scheduler_type": "cosine",
        "optim": "sgd",
        "report_to": "none",
        "save_steps": 7,
        "save_strategy": "epoch",
        "torch_compile_backend": "eager",
    }
    if name in known:
        return known[name]
    kind, default = str(FIELDS[name].type), default_of(FIELDS[name])
    if "dict" in kind:
        return '{"key": 1}'
    if "bool" in kind and "str" not in kind:
        return not default
    if "int" in kind or "float" in kind:
        return 3
    return "x"


@pytest.mark.parametrize("name", [name for rule in (*BY_RECIPE, *BY_TRAINER) for name in rule.names if name in FIELDS])
def test_honored_flags_reach_the_trainer(name):
    value, beside = other_value(name), {}
    if name == "dataloader_prefetch_factor":
        beside["dataloader_num_workers"] = 2
    if name == "fp16":
        beside["bf16"] = False
    if RULE_OF[name].needs_eval_data:
        beside["eval_data"] = "e"
    if name == "load_best_model_at_end":
        beside |= {"save_strategy": "steps", "eval_strategy": "steps", "save_steps": 5, "eval_steps": 5}
    if name in ("use_cpu", "dataloader_pin_memory", "tf32", "enable_jit_checkpoint", "ddp_backend"):
        pytest.skip("depends on the machine and its processes")
    of_flag = parsed(*[each for pair in beside.items() for each in (f"--{pair[0]}", pair[1])], f"--{name}", value)
    of_file = parsed(**beside, **{name: value})
    value = "all" if name == "include_num_input_tokens_seen" else value
    wanted = {"key": 1} if value == '{"key": 1}' else value
    for config in (of_flag, of_file):
        found = getattr(config, name)
        found = getattr(found, "value", found[0] if isinstance(found, list) and found else found)
        assert found == wanted or (name == "report_to" and found == []) or str(found) == str(wanted)


def test_no_flag_is_abbreviated():
    """--gradient would be one of three."""
    with pytest.raises(ValueError, match="not used by the HfArgumentParser"):
        parsed("--resume", "last")


def test_evaluation_needs_data():
    assert "--eval_steps: expected --eval_data beside it" in exits(parsed, "--eval_steps", 3)
    assert "--do_eval: expected --eval_data beside it" in exits(parsed, do_eval=True)


def test_flags_of_the_recipe_that_would_have_no_effect():
    known = {"data": "d", "model": "m"}
    for wrong, said in (
        ({"strategy": "best"}, "--strategy: expected one of none, best_fit"),
        ({"loss": "tokens"}, "--loss: expected one of token, sequence, got 'tokens'"),
        ({"max_tokens": 0}, "--max_tokens: expected an integer from 1, got 0"),
        ({"pack_length": "many"}, "--pack_length: expected an integer from 1, got 'many'"),
        ({"pack_length": 64, "max_tokens": 128}, "--pack_length: expected none beside --max_tokens"),
        ({"per_turn": True, "strategy": "bucket"}, "--share_prefixes: expected False with --strategy bucket"),
    ):
        assert said in exits(sft.Arguments, **known, **wrong)
    assert sft.Arguments(**known, strategy="best_fit", pack_length=64, max_tokens=128).max_tokens == 128
    assert sft.Arguments(**known, pack_length=64).max_tokens == 64
    assert [sft.Arguments(**known, per_turn=each).share_prefixes for each in (False, True)] == [False, True]
    assert not sft.Arguments(**known, per_turn=True, strategy="bucket", share_prefixes=False).share_prefixes


def test_the_configuration_that_comes_along():
    settings = yaml.safe_load((Path(sft.__file__).parent / "configs" / "sft.yaml").read_text())
    assert not list(sft_parser.problems(settings))
    own = {field.name for field in fields(sft.Arguments)} & settings.keys()
    assert sft.Arguments(data="d", **{name: settings[name] for name in own})
