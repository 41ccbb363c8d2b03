"""recipes/sft.py, run: what its flags do."""

import re
import shutil

import pytest
import sft
import torch
import yaml
from recipe_inputs import chats, prompts, save_tiny_model, write

import hf_packing as hfp
from tools.tiny_model import tiny_model as tiny_model_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default::FutureWarning"),  # TRL uses names that transformers has renamed
]

IGNORED = -100
QUIET = ["--report_to", "none", "--disable_tqdm", "True", "--logging_steps", "1"]
CPU = ["--use_cpu", "True", "--bf16", "False"]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "prompts.jsonl", prompts())


@pytest.fixture(scope="module")
def chat_data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "chats.jsonl", chats())


@pytest.fixture
def train(tiny_model, data, tmp_path):
    def run(*flags, data=data, model=tiny_model, output=tmp_path / "output", steps=2):
        known = ["--data", data, "--model_name_or_path", model, "--output_dir", output]
        known += ["--max_steps", steps, "--max_tokens", 160]
        return sft.main([str(each) for each in [*known, *QUIET, *CPU, *flags]])

    return run


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


REFUSED = [
    (("--resume_from_checkpoint", "last"), "--resume_from_checkpoint"),
    (("--resume_from_checkpoint", "{folder}"), "--resume_from_checkpoint"),
    (("--eval_strategy", "epoch"), "--eval_data"),
    (("--data", "{chats}", "--per_turn", "True", "--train_on", "all"), "--train_on"),
    (("--data", "{chats}", "--per_turn", "True", "--completion_only_loss", "False"), "--train_on"),
    (("--dataset_text_field", "body"), "row 0: expected body"),
    (("--per_turn", "True"), "tokenizer: expected a tokenizer with a chat template"),
    (("--data", "{chats}", "--train_on", "completion"), "row 0: expected train_on='assistant' or 'all'"),
    (("--loss_type", "dft", "--loss", "sequence"), "loss_type: expected"),
    (("--label_smoothing_factor", "0.5", "--loss", "sequence"), "label_smoothing_factor: expected 0"),
    (("--eos_token", "<none>"), "eos_token"),
]


@pytest.mark.filterwarnings("ignore:tokenize.* end-of-sequence token")
@pytest.mark.parametrize(("flags", "argument"), REFUSED)
def test_refused(train, chat_data, tmp_path, flags, argument):
    with pytest.raises(ValueError, match=argument):
        train(*(each.format(folder=tmp_path, chats=chat_data) for each in flags))


def test_tokens_and_packed_rows_are_trained_on_as_they_are(train, tmp_path):
    documents = train(steps=1, output=tmp_path / "documents").train_dataset
    packed = hfp.pack(documents, hfp.BestFit(160, seed=0))
    for name, rows in (("tokens", documents), ("packed", packed)):
        rows.save_to_disk(tmp_path / name)
        trainer = train(data=tmp_path / name, steps=1, output=tmp_path / f"{name}-output")
        assert trainer.train_dataset["input_ids"][:] == rows["input_ids"][:]
        with pytest.raises(ValueError, match="--train_on: expected none beside tokens or --per_turn, .* got 'all'"):
            train("--train_on", "all", data=tmp_path / name, output=tmp_path / f"{name}-other")
        with pytest.raises(ValueError, match="--train_on: .* not both, got None"):
            train("--per_turn", "True", data=tmp_path / name, output=tmp_path / f"{name}-turns")


def test_documents_are_cut_at_max_length(train, tmp_path):
    trainer = train("--max_length", 30, steps=1)
    lengths = [len(row) for row in trainer.train_dataset["input_ids"]]
    batches = list(trainer.get_train_dataloader())
    assert max(lengths) > 30
    assert max(int(batch["max_length_q"]) for batch in batches) == 30
    assert sum(batch["input_ids"].numel() for batch in batches) == sum(min(length, 30) for length in lengths)
    with pytest.raises(ValueError, match="--max_length: expected none with --strategy, got 30"):
        train("--max_length", 30, "--strategy", "best_fit", output=tmp_path / "other")


@pytest.mark.parametrize("name", sft.WITHOUT_EFFECT)
def test_flags_without_effect_are_refused(train, name):
    value = {"dataset_kwargs": '{"a": 1}', "length_column_name": "n", "truncation_mode": "keep_end"}.get(name, "3")
    value = {"packing_strategy": "wrapped"}.get(name, value)
    value = "True" if name in ("dataloader_drop_last", "shuffle_dataset", "packing", "padding_free") else value
    with pytest.raises(ValueError, match=f"--{name}: expected none, since --max_tokens and --strategy decide that"):
        train(f"--{name}", value)


def test_help_has_one_default_for_each_flag(capsys):
    with pytest.raises(SystemExit):
        sft.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split()).split(" --")
    assert sum("(default: " in each for each in shown) > 50
    assert not [each for each in shown if "(default: " in each and "default" in each.split("(default: ")[0].lower()]


def test_lora(train, tmp_path):
    flags = ("--use_peft", "--lora_r", 4, "--lora_target_modules", "q_proj", "v_proj", "--save_steps", 1)
    trainer = train(*flags)
    trained = {name for name, each in trainer.model.named_parameters() if each.requires_grad}
    assert trained
    assert all(".lora_" in name for name in trained)
    assert (tmp_path / "output" / "adapter_model.safetensors").is_file()
    shutil.rmtree(tmp_path / "output" / "checkpoint-2")
    assert losses(train(*flags, "--resume_from_checkpoint", "last")) == losses(trainer)


def trained(trainer):
    return [
        trainer.processing_class.decode([label for label in labels if label != IGNORED])
        for labels in trainer.train_dataset["labels"]
    ]


def test_what_is_trained_on(train, chat_data, tmp_path):
    outputs = (tmp_path / str(number) for number in range(99))

    def texts(*flags, **options):
        return trained(train(*flags, steps=1, output=next(outputs), **options))

    answers = [row["completion"] + "<|endoftext|>" for row in prompts()]
    assert texts() == texts("--completion_only_loss", "True") == texts("--train_on", "completion") == answers
    whole = [row["prompt"] + answer for row, answer in zip(prompts(), answers, strict=True)]
    assert texts("--completion_only_loss", "False") == texts("--train_on", "all") == whole
    turns = [
        "".join(f"{message['content']}<|im_end|>\n" for message in row["messages"] if message["role"] == "assistant")
        for row in chats()
    ]
    assert texts(data=chat_data) == texts("--assistant_only_loss", "True", data=chat_data) == turns
    assert all(text.startswith("<|im_start|>user\nHi") for text in texts("--train_on", "all", data=chat_data))


@pytest.mark.parametrize("strategy", ["none", "best_fit"])
def test_per_turn(train, chat_data, tmp_path, strategy):
    """Each turn of a chat is a document of its own, packed or not, and shares the text before it unless told not to."""
    turns = sum(len(row["messages"]) // 2 for row in chats())
    assert turns > len(chats())
    steps = []
    flags = ("--per_turn", "True", "--strategy", strategy, "--eval_data", chat_data, "--max_tokens", 4096)
    for share in ((), ("--share_prefixes", "False")):
        trainer = train(*flags, *share, data=chat_data, steps=1, output=tmp_path / str(len(share)))
        rows = trainer.train_dataset if strategy == "none" else hfp.unpack(trainer.train_dataset)
        assert len(rows) == len(trainer.eval_dataset) == turns
        found = (trainer.processing_class.decode([each for each in row if each != IGNORED]) for row in rows["labels"])
        assert {re.sub("(Ho)+", "Ho", text) for text in found} == {"Ho<|im_end|>"}
        (batch,) = trainer.get_train_dataloader()
        assert ("parents" in batch) == (share == ())
        steps.append((batch["input_ids"].numel(), trainer.state.log_history[0]))
    (unique, sharing), (raw, alone) = steps
    assert unique < 0.9 * raw
    assert sharing["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert sharing["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)


def test_what_cannot_share_prefixes(train, chat_data, tmp_path, tmp_path_factory):
    batches = train("--share_prefixes", "True", data=chat_data, steps=1).get_train_dataloader()
    assert any((batch["parents"] >= 0).any() for batch in batches)
    flags = ("--per_turn", "True", "--loss_type", "dft")
    with pytest.raises(hfp.PackingError, match="one F.cross_entropy of its logits .* computes 0"):
        train(*flags, data=chat_data, output=tmp_path / "dft")
    assert losses(train(*flags, "--share_prefixes", "False", data=chat_data, output=tmp_path / "alone"))
    model = save_tiny_model(tmp_path_factory.mktemp("looks_ahead"))
    tiny_model_of("axk2", "causal").save_pretrained(model)
    with pytest.raises(hfp.ModelNotSupportedError, match="AXK2ForCausalLM: the outputs for a pre"):
        train("--per_turn", "True", data=chat_data, model=model, output=tmp_path / "ahead")


@pytest.mark.parametrize("strategy", sft.STRATEGIES)
def test_packs_have_the_seed(train, strategy, tmp_path):
    def rows(seed, name):
        trainer = train("--strategy", strategy, "--seed", seed, steps=1, output=tmp_path / name)
        assert max(map(len, trainer.train_dataset["seq_lengths"])) > 1
        return trainer.train_dataset["input_ids"][:]

    one = rows(1, "one")
    assert rows(1, "same") == one != rows(2, "other")


def test_evaluation_and_other_flags(train, data, tmp_path):
    trainer = train("--eval_data", data, "--eval_strategy", "steps", "--eval_steps", 1, "--bf16_full_eval", "True")
    found = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(found) == 3
    flags = ("--include_num_input_tokens_seen", "True", "--skip_memory_metrics", "False", "--log_level", "error")
    flags += ("--dataloader_num_workers", 1, "--dataloader_prefetch_factor", 3, "--torch_empty_cache_steps", 1)
    flags += ("--dataloader_persistent_workers", "True", "--debug", "underflow_overflow")
    trainer = train(*flags, "--logging_steps", 2, output=tmp_path / "other")
    (entry,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert entry["num_input_tokens_seen"] == entry["tokens_per_step"] * 2
    loader = trainer.callback_handler.train_dataloader
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)


@pytest.mark.filterwarnings("default::DeprecationWarning")  # processes are forked beside threads
def test_flags_of_the_model_and_of_the_texts(train, chat_data, tmp_path):
    (tmp_path / "mine.jinja").write_text(sft.common.CHATML.replace("<|im_start|>", "# "))
    flags = ("--chat_template_path", tmp_path / "mine.jinja", "--dataset_num_proc", 2, "--pad_token", "<|im_start|>")
    flags += ("--model_init_kwargs", '{"attn_implementation": "eager", "dtype": "bfloat16"}')
    trainer = train(*flags, data=chat_data, steps=1)
    assert trainer.model.dtype == torch.bfloat16
    assert trainer.model.config.pad_token_id == trainer.processing_class.pad_token_id == 2
    assert trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"]).startswith("# user\nHi")
    assert (tmp_path / "output" / "chat_template.jinja").read_text().startswith("{% for message")
    trainer = train("--eos_token", "<|im_end|>", steps=1, output=tmp_path / "end")
    end = trainer.processing_class.convert_tokens_to_ids("<|im_end|>")
    assert {row[-1] for row in trainer.train_dataset["input_ids"]} == {end}
    with pytest.raises(Exception, match="no-such-implementation"):
        train("--model_init_kwargs", '{"attn_implementation": "no-such-implementation"}', output=tmp_path / "none")


def test_yaml_says_what_flags_say(tiny_model, data, tmp_path):
    settings = {"data": str(data), "model_name_or_path": str(tiny_model), "max_tokens": 160, "max_steps": 2}
    settings |= {"bf16": True, "learning_rate": "1e-3", "logging_steps": 1, "disable_tqdm": True, "loss": "sequence"}
    settings["report_to"] = "none"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | {"output_dir": str(tmp_path / "yaml")}))
    of_file = sft.main(["--config", str(tmp_path / "run.yaml")])
    flags = settings | {"output_dir": tmp_path / "flags"}
    of_flags = sft.main([str(each) for name, value in flags.items() for each in (f"--{name}", value)])
    assert of_file.args.bf16
    assert of_flags.args.bf16
    assert losses(of_file) == losses(of_flags)
    assert len(losses(of_file)) == 2
    for name, message in (("packing", "--packing: expected none"), ("no_such", "no_such")):
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings | {name: True}))
        with pytest.raises(ValueError, match=message):
            sft.main(["--config", str(tmp_path / "run.yaml")])
