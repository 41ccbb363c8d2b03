"""Documents for the recipes: the standard library's own functions, or the user's data; and their tokens."""

import ast
import sysconfig
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

TEXT_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
VOCABULARY = 8192


def standard_library_functions() -> datasets.Dataset:
    """The source of every function and method of the standard library, tests left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    functions = []
    files = sorted(library.rglob("*.py"))
    for file in tqdm(files, desc="Reading the standard library", unit=" files"):
        if {"site-packages", "test", "tests"} & set(file.relative_to(library).parts):
            continue
        try:
            source = file.read_text(encoding="utf-8")
            nodes = [ast.parse(source)]
        except (SyntaxError, UnicodeDecodeError):  # a few files are bad on purpose
            continue
        lines = [
            line + "\n" for line in source.split("\n")
        ]  # as ast counts them; splitlines would also cut at form feeds
        while nodes:
            node = nodes.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                functions.append("".join(lines[first - 1 : node.end_lineno]))
            else:
                nodes.extend(reversed(list(ast.iter_child_nodes(node))))
    return datasets.Dataset.from_dict({"text": functions})


def read_documents(data: str | None) -> datasets.Dataset:
    if data is None:
        return standard_library_functions()
    suffixes = [suffix for suffix in Path(data).suffixes if suffix in TEXT_FORMATS]
    if Path(data).is_file():
        if not suffixes:
            raise SystemExit(f"--data: expected a file ending in {', '.join(TEXT_FORMATS)}, got {data!r}")
        return datasets.load_dataset(TEXT_FORMATS[suffixes[-1]], data_files=data, split="train")
    if suffixes:
        raise SystemExit(f"--data: expected a file or a dataset's name, got {data!r}, which does not exist")
    return datasets.load_dataset(data, split="train")


def as_text(row: dict) -> str:
    if "text" in row:
        return row["text"]
    if "prompt" in row and "completion" in row:
        return f"{row['prompt']}\n{row['completion']}"
    if "messages" in row:
        return "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
    raise SystemExit(
        f"--data: expected text, prompt and completion, messages or input_ids, got columns {', '.join(row)}"
    )


def train_tokenizer(documents: datasets.Dataset) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(map(as_text, documents), trainer, length=len(documents))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")


def load_tokenizer(name: str | None, documents: datasets.Dataset) -> PreTrainedTokenizerBase:
    """The named tokenizer, or one trained on the documents."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    if "input_ids" in documents.column_names:
        raise SystemExit("--tokenizer: expected one beside --data with input_ids, got none")
    return train_tokenizer(documents)


def tokenise(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    if "input_ids" in documents.column_names:
        return documents.select_columns("input_ids")

    def encode(batch: dict) -> dict:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        texts = [as_text(row) + tokenizer.eos_token for row in rows]
        return {"input_ids": tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]}

    return documents.map(encode, batched=True, remove_columns=documents.column_names, desc="Tokenising")
