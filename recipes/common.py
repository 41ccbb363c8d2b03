"""What several recipes need: rows, data and tiny models to try them without a download, and checkpoints.

To start a project of your own, copy one recipe and this file; `functions` and all below it only serve to try recipes.
"""

import argparse
import ast
import gc
import os
import re
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from glob import escape, glob
from importlib.metadata import version
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import set_seed
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    TrainerState,
    TrainingArguments,
)

import hf_packing as hfp

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
SIZES = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
STATE = "trainer_state.json"  # the file of a checkpoint that is written last
OF_TRAINING = ("optimizer*", "scheduler*", "rng_state*", "train*", "global_step*")  # files without which a model loads
NO_TRACEBACK = ("--", "Some specified arguments are not used")  # errors of flags: ours, and HfArgumentParser's
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def run(main: Callable[[], Any]) -> None:
    """Run a recipe; print what it refuses on one process only, and end the group of processes."""
    try:
        main()
    except (ValueError, OSError) as error:
        if not isinstance(error, (hfp.PackingError, OSError)) and not str(error).startswith(NO_TRACEBACK):
            raise  # no flag or file is wrong: the traceback says more
        if not is_first_process():
            time.sleep(30)  # the launcher ends this process once the first one has printed the error
        sys.exit(str(error))
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"  # as torchrun sets it; there may be no group of processes yet


def flag(default: Any, says: str, **more: Any) -> Any:
    """Return a field of a dataclass of flags."""
    return field(default=default, metadata={"help": says, **more})


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formats --help: the docstring as it is, and one default for each flag, also if its text names the default."""

    def _format_usage(self, usage: str | None, *others: Any) -> str:
        return super()._format_usage(usage or "%(prog)s [flags]", *others)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        known = action.required or "default" in (action.help or "").lower()
        return action.help if known else super()._get_help_string(action)


def first_and_last(values: Sequence[float]) -> tuple[int, float, float]:
    """Return a quarter of the number of values, at least 1, and the means of the first and of the last so many."""
    some = max(1, len(values) // 4)
    return some, sum(values[:some]) / some, sum(values[-some:]) / some


def on_cpu() -> dict[str, Any]:
    """Return the training arguments that a machine without an accelerator needs."""
    return {} if torch.accelerator.is_available() else {"use_cpu": True, "bf16": False}


def read(data: str, columns: Sequence[str] = (), flag: str = "--data") -> datasets.Dataset:
    """Return the rows of a file, of the files of a pattern, of a folder of `save_to_disk`, or of a dataset on the hub.

    Args:
        data: path, pattern, or name of the dataset. Each line of a .txt file is a row.
        columns: columns that the rows must have.
        flag: the flag that names the data.

    Raises:
        ValueError: there is no such file, or the rows lack a column.
    """
    path = Path(data)
    formats = [FORMATS[suffix] for suffix in path.suffixes if suffix in FORMATS]
    files = [data] if path.is_file() else sorted(glob(data, recursive=True))
    if formats and not files:
        raise ValueError(f"{flag}: expected a file or a dataset's name, got {data!r}, which does not exist")
    if path.is_file() and not formats:
        raise ValueError(f"{flag}: expected a file ending in {', '.join(FORMATS)}, got {data!r}")
    if formats:
        rows = datasets.load_dataset(formats[-1], data_files=list(map(escape, files)), split="train")
    else:
        rows = datasets.load_from_disk(data) if path.is_dir() else datasets.load_dataset(data, split="train")
    if missing := [name for name in columns if name not in rows.column_names]:
        raise ValueError(f"{flag}: expected columns {', '.join(columns)}, got no {missing[0]}")
    return rows


def train_and_test(
    data: str | None, eval_data: str | None, columns: Sequence[str], without_data: Callable[[], datasets.Dataset]
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows of --data, or others without it, and those of --eval_data, or else a tenth of all rows."""
    rows = read(data, columns) if data else without_data()
    if eval_data:
        return rows, read(eval_data, columns, "--eval_data")
    split = rows.train_test_split(test_size=0.1, seed=0)
    return split["train"], split["test"]


def checkpoint_of(args: TrainingArguments) -> str | None:
    """Return the checkpoint to resume from, or None for a new run; exit if the run is finished.

    `--resume_from_checkpoint last` (or True) resumes from the last complete checkpoint in --output_dir.

    Raises:
        ValueError: there is no checkpoint to resume from, or a new run would overwrite checkpoints of an earlier run.
    """
    found, asked = complete_checkpoints(args.output_dir), args.resume_from_checkpoint
    if asked is None:
        if found:
            there = f"{args.output_dir!r} has some of an earlier run; --resume_from_checkpoint last resumes"
            raise ValueError(f"--output_dir: expected a folder without checkpoints, {there}")
        return None
    if str(asked).lower() not in ("last", "true"):
        found = [Path(asked)]
    if not found or not (found[-1] / STATE).is_file():
        raise ValueError(f"--resume_from_checkpoint: expected a checkpoint in {args.output_dir!r}, got {asked!r}")
    state, before = TrainerState.load_from_json(str(found[-1] / STATE)), found[-1] / "training_args.bin"
    if state.global_step >= args.max_steps > 0 or (args.max_steps <= 0 and state.epoch >= args.num_train_epochs):
        if is_first_process():
            print(f"{found[-1]} has the last step of the run: nothing is left to train")
            if before.is_file() and not any(Path(args.output_dir).glob("*.safetensors")):  # it was killed before
                left_out = shutil.ignore_patterns(*OF_TRAINING)
                shutil.copytree(found[-1], args.output_dir, ignore=left_out, dirs_exist_ok=True)
        sys.exit(0)
    if before.is_file() and (rate := torch.load(before, weights_only=False).learning_rate) != args.learning_rate:
        raise ValueError(f"--learning_rate: expected {rate}, as in the checkpoint, got {args.learning_rate}")
    if is_first_process():
        print(f"resuming from {found[-1]}")
    return str(found[-1])


def complete_checkpoints(output_dir: str) -> list[Path]:
    """Return the checkpoints in a folder by step, without those that a run was killed while saving."""
    found = Path(output_dir).glob(f"checkpoint-*/{STATE}")
    whole = [file.parent for file in found if file.read_text().endswith("}\n")]
    return sorted(whole, key=lambda each: int(each.name.split("-")[1]))


def check_positive(args: Any, *names: str) -> None:
    """Raise ValueError if an argument is below 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(f"--{name}: expected an integer from 1, got {getattr(args, name)}")


def epochs_done(loader: hfp.PackedLoader) -> float:
    return loader.epoch + loader.micro_batches_done / len(loader)


def finished(loader: hfp.PackedLoader, args: Any) -> bool:
    """Return whether a training loop of your own has done --max_steps, or else --num_train_epochs."""
    if args.max_steps > 0:
        return loader.optimizer_steps >= args.max_steps
    return epochs_done(loader) >= args.num_train_epochs


def save(accelerator: Accelerator, loader: hfp.PackedLoader, output_dir: str) -> None:
    """Save a checkpoint of your own loop, the state last, since a run may be killed; delete all but the last two."""
    folder = Path(output_dir) / f"checkpoint-{loader.optimizer_steps}"
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        state = TrainerState(global_step=loader.optimizer_steps, epoch=epochs_done(loader))
        state.save_to_json(str(folder / STATE))
        for other in {*folder.parent.glob("checkpoint-*")} - {*complete_checkpoints(output_dir)[-2:]}:
            shutil.rmtree(other)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, loader: hfp.PackedLoader, optimizer: Any, checkpoint: str, rate: float) -> None:
    """Load a checkpoint that `save` has saved; its optimizer must have the learning rate `rate`."""
    accelerator.load_state(checkpoint)
    if rate != (saved := optimizer.param_groups[0]["lr"]):
        raise ValueError(f"--learning_rate: expected {saved}, as in the checkpoint, got {rate}")
    done = f"{loader.micro_batches_done} of {len(loader)} micro-batches"
    accelerator.print(f"resuming {checkpoint}: in epoch {loader.epoch} after {done}")


def save_model(accelerator: Accelerator, model: Any, tokenizer: PreTrainedTokenizerBase, output_dir: str) -> None:
    """Save the model and its tokenizer, to be loaded with `from_pretrained`."""
    weights = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained(output_dir, state_dict=weights)
        tokenizer.save_pretrained(output_dir)


def loading_of(model: Any) -> dict[str, Any]:
    """Return how TRL's `ModelConfig` says to load a model, as `model_init_kwargs`, which also trainers before TRL 1.8
    take, that have no argument `quantization_config`."""
    from trl import get_quantization_config  # other recipes do without TRL

    loading = {"revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype}
    quantized = get_quantization_config(model)
    return loading if quantized is None else loading | {"quantization_config": quantized}


def refuse_lost_pieces() -> None:
    """Raise PackingError if tokenizers loses pieces of long texts in silence, as 0.23.1 and 0.23.2 do."""
    found = version("tokenizers")
    if found in ("0.23.1", "0.23.2"):
        raise hfp.PackingError(
            f"tokenizers: expected a version that returns all pieces of a long text, got {found}, which loses most of "
            'them; pip install "tokenizers!=0.23.1,!=0.23.2"'
        )


def texts(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Yield the texts of rows, or else all that they say, to train a tokenizer on."""
    for row in rows:
        if "input_ids" in row:
            raise ValueError("--tokenizer: expected one beside --data with input_ids, got none")
        yield row.get("text") or " ".join(map(str, row.values()))


def functions() -> datasets.Dataset:
    """Return the source of every function and method of Python's standard library, without its tests, as `text`."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found = []
    gc.disable()  # it would look through all imported libraries, while ast makes millions of objects
    for file in tqdm(sorted(library.rglob("*.py")), desc="Reading the standard library", unit=" files"):
        if {"site-packages", "test", "tests"} & set(file.relative_to(library).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            nodes: list[ast.AST] = [ast.parse(source)]
        except (SyntaxError, UnicodeDecodeError):  # a few files are bad on purpose
            continue
        lines = [line + "\n" for line in source.split("\n")]  # as ast counts them; splitlines also cuts at form feeds
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found.append("".join(lines[first - 1 : node.end_lineno]))
            else:
                nodes.extend(reversed(list(ast.iter_child_nodes(node))))
    gc.enable()
    return datasets.Dataset.from_dict({"text": found})


def pairs() -> datasets.Dataset:
    """Return first lines of functions as `prompt`, their rest as `chosen`, and that of the next one as `rejected`."""
    halves = [text.split("\n", 1) for text in functions()["text"] if "\n" in text.strip()]
    prompts, answers = [line for line, _ in halves], ["\n" + answer for _, answer in halves]
    return datasets.Dataset.from_dict({"prompt": prompts, "chosen": answers, "rejected": answers[1:] + answers[:1]})


def described() -> datasets.Dataset:
    """Return first lines of docstrings as `anchor`, and the functions without their docstrings as `positive`."""
    docstring = re.compile(r'\n *r?"""\s*(.+?)("""|\n.*?""")\n(?=.)', re.DOTALL)
    found = [(text, match) for text in functions()["text"] if (match := docstring.search(text))]
    positives = [text[: match.start() + 1] + text[match.end() :] for text, match in found]
    return datasets.Dataset.from_dict({"anchor": [match[1].strip() for _, match in found], "positive": positives})


def questions() -> datasets.Dataset:
    """Return questions about the arguments and the returned values of functions, as rows of SQuAD."""
    rows = []
    for number, text in enumerate(functions()["text"]):
        context = textwrap.dedent(text)
        asked = [
            ("Which arguments does {} take?", r"def \w+\((.+?)\)(?: -> .+)?:\n"),
            ("What does {} return?", r"\n +return (.+)\n"),
        ]
        question, pattern = asked[number % 2]
        name = re.search(r"def (\w+)\(", context)
        if name and (found := re.search(pattern, context)):
            answers = {"text": [found[1]], "answer_start": [found.start(1)]}
            rows.append({"question": question.format(name[1]), "context": context, "answers": answers})
    return datasets.Dataset.from_list(rows)


def load_tokenizer(
    name: str | None, texts: Iterable[str], masked: bool = False, vocabulary: int = 8192
) -> PreTrainedTokenizerBase:
    """Return the named tokenizer, or one trained on the texts, the same on every process.

    Args:
        name: name or folder; None to train a byte-level BPE with a ChatML template.
        texts: what to train it on.
        masked: whether the trained tokenizer is as BERT's: with tokens around each text, one for masks, no template.
        vocabulary: number of tokens that the trained tokenizer knows.
    """
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    names |= {f"{name}_token": f"<|{name}|>" for name in ("cls", "sep", "mask")} if masked else {}
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = [*names.values(), "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    if masked:
        around = [(token, backend.token_to_id(token)) for token in (names["sep_token"], names["cls_token"])]
        backend.post_processor = processors.BertProcessing(*around)
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=None if masked else CHATML, **names)


def token_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Return the special tokens of a tokenizer, as a model's configuration names them."""
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}


def small_llama(vocabulary: int, **settings: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **SIZES, **settings)


def small_bert(vocabulary: int, max_length: int, **settings: Any) -> BertConfig:
    return BertConfig(vocab_size=vocabulary, max_position_embeddings=max(512, max_length), **SIZES, **settings)


def load_model(head: Any, name: str | None, small: PreTrainedConfig, **settings: Any) -> PreTrainedModel:
    """Return a model with the same weights on every process.

    Args:
        head: one of the auto classes of transformers.
        name: name or folder; None for a small one from scratch.
        small: configuration of the small one.
        settings: fields of the configuration of the named one to change.
    """
    set_seed(0)
    return head.from_pretrained(name, dtype=torch.float32, **settings) if name else head.from_config(small)


def save_small(folder: str, texts: Iterable[str], encoder: bool = False, **settings: Any) -> str:
    """Save a small model from scratch with its tokenizer, for trainers that load both by name; return the folder.

    Call it within `main_process_first`: the main process saves, the others return the folder.

    Args:
        folder: where to save them.
        texts: what to train the tokenizer on.
        encoder: whether to save a BERT, and not a Llama.
        settings: fields of the configuration of the Llama.
    """
    if PartialState().is_local_main_process:
        tokenizer = load_tokenizer(None, texts, masked=encoder)
        tokenizer.save_pretrained(folder)
        ids = token_ids(tokenizer)
        small = small_bert(len(tokenizer), 512, **ids) if encoder else small_llama(len(tokenizer), **ids, **settings)
        load_model(AutoModel if encoder else AutoModelForCausalLM, None, small).save_pretrained(folder)
    return folder
