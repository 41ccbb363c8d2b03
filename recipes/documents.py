"""Documents for the recipes: the functions of the standard library, or the user's data; and their tokens."""

import ast
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm.auto import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_packing.data.documents import Documents, load
from hf_packing.data.rendering import EVERYTHING, BadRowError, chatml, kind_of_row, render
from hf_packing.data.tokenize import text_tokenizer

FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".txt": "text"}
VOCABULARY = 8192


def standard_library_functions() -> datasets.Dataset:
    """Return the source of every function and method of the standard library, without its tests."""
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


def read_documents(data: str | None, flag: str = "--data") -> datasets.Dataset:
    """Return the rows of a file, of a saved dataset or of one on the hub; without data, the standard library's.

    `datasets` keeps the rows of a file in its cache, for the next run and for the other processes.
    """
    if data is None:
        return standard_library_functions()
    formats = [FORMATS[suffix] for suffix in Path(data).suffixes if suffix in FORMATS]
    if not Path(data).is_file():
        if formats:
            raise SystemExit(f"{flag}: expected a file or a dataset's name, got {data!r}, which does not exist")
        return load(data)
    if not formats:
        raise SystemExit(f"{flag}: expected a file ending in {', '.join(FORMATS)}, got {data!r}")
    try:
        return datasets.load_dataset(formats[-1], data_files=data, split="train")
    except datasets.exceptions.DatasetGenerationError:
        documents = Documents(data, skip_bad=True)  # names the bad line
        for _ in documents:
            pass
        if documents.skipped:
            raise SystemExit(f"{flag}: {documents.skipped[0]}") from None
        raise


def train_and_test(
    rows: datasets.Dataset,
    eval_data: str | None,
    read: Callable[[str, str], datasets.Dataset] = read_documents,
) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Return the rows to train on, and those of --eval_data, or else a tenth of the rows, to evaluate on."""
    if eval_data is not None:
        return rows, read(eval_data, "--eval_data")
    if len(rows) < 2:
        raise SystemExit(f"--data: expected two rows or more, or rows in --eval_data, got {len(rows)}")
    split = rows.train_test_split(test_size=0.1, seed=0)
    return split["train"], split["test"]


def as_text(row: dict) -> str:
    """Return the text of a row; chats are written as ChatML."""
    return render(row, kind_of(row), chatml).text


def kind_of(row: dict) -> str:
    """Return the kind of a row, named by the column that decides it."""
    try:
        return kind_of_row(row, None)
    except BadRowError:
        raise SystemExit(
            f"--data: expected text, prompt and completion, messages or input_ids, got columns {', '.join(row)}"
        ) from None


def train_tokenizer(documents: datasets.Dataset, special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE trained on the documents, the same on every process, with more special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(map(as_text, documents), trainer, length=len(documents))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")


def train_masked_tokenizer(documents: datasets.Dataset) -> PreTrainedTokenizerFast:
    """Return a tokenizer for masked language models: with tokens around each text, and one for masks."""
    names = {name: f"<|{name}|>" for name in ("cls", "sep", "mask")}
    tokenizer = train_tokenizer(documents, list(names.values()))
    tokenizer.add_special_tokens({f"{name}_token": token for name, token in names.items()})
    sep, cls = ((names[name], tokenizer.convert_tokens_to_ids(names[name])) for name in ("sep", "cls"))
    tokenizer.backend_tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


def load_tokenizer_for(name: str | None, rows: datasets.Dataset, columns: Sequence[str]) -> PreTrainedTokenizerBase:
    """Return the named tokenizer, or one trained on the texts in these columns of the rows, joined."""
    if name:
        return load_tokenizer(name, rows)
    if not isinstance(rows[0][columns[0]], str):
        raise SystemExit("--tokenizer: expected one with a chat template, since --data has messages, got none")
    texts = ["".join(row[column] for column in columns) for row in rows]
    return train_tokenizer(datasets.Dataset.from_dict({"text": texts}))


def load_tokenizer(name: str | None, documents: datasets.Dataset) -> PreTrainedTokenizerBase:
    """Return the named tokenizer, or one trained on the documents."""
    if name:
        tokenizer = AutoTokenizer.from_pretrained(name)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer
    if "input_ids" in documents.column_names:
        raise SystemExit("--tokenizer: expected one beside --data with input_ids, got none")
    return train_tokenizer(documents)


def tokenize(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerBase) -> datasets.Dataset:
    """Return the tokens of the documents, all of which are trained on."""
    if "input_ids" in documents.column_names:
        return documents.select_columns("input_ids")
    return documents.map(
        tokens_of,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=documents.column_names,
        desc="Tokenizing",
    )


def tokens_of(batch: dict, tokenizer: PreTrainedTokenizerBase) -> dict:
    """Return the tokens of a batch of rows, as `hf-packing pack` makes them."""
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    texts = text_tokenizer(tokenizer)
    rendered = [render(row, kind_of(row), texts.template, train_on=EVERYTHING) for row in rows]
    return {"input_ids": texts.tokens(rendered, ended=True)[0]}
