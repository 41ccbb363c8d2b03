"""`hf-packing pack` and `report` on chats, prompts with completions, texts and tokens, and `hfp.tokenize` on them."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from goldens.inputs import digest, digest_of_dataset, documents, related, save_tokenizer, words, write_lines
from transformers import AutoTokenizer

import hf_packing as hfp
from hf_packing.cli import main

_OF_THE_RUN = ("output", "tokenized_before", "source", "seconds")
"""Names in the JSON of the command that are not about the data: paths, times, and work of an interrupted run."""


def packed(folder: Path) -> dict[str, str]:
    """Rows and plans that `pack` writes, what `report` prints, and the documents that `tokenize` returns."""
    tokenizer = save_tokenizer(folder / "tokenizer")
    files = {name: write_lines(folder / f"{name}.jsonl", rows) for name, rows in _sources().items()}
    flags: dict[str, list[list[str]]] = {
        "chats": [[], ["--train-on", "assistant"], ["--train-on", "all"]],
        "completions": [[], ["--train-on", "completion"], ["--train-on", "all"], ["--separator", "four four"]],
        "texts": [[], ["--no-eos"], ["--field", "other"]],
    }
    found = {}
    for source, choices in flags.items():
        for given in choices:
            case = " ".join([source, *given])
            found[case] = _pack(folder / "packed" / case, files[source], "--tokenizer", tokenizer, *given)
    found["tokens"] = _pack(folder / "packed" / "tokens", files["tokens"])
    texts = (files["texts"], "--tokenizer", tokenizer)
    for strategy in ("first_come", "multipack", "shortest_pack_first", "fixed_length"):
        found[f"texts, {strategy}"] = _pack(folder / "packed" / strategy, *texts, "--strategy", strategy)
    for strategy in ("bucket", "bucket_by_length"):
        more = ("--strategy", strategy, "--max-length", "16", "32", "64")
        found[f"texts, {strategy}"] = _pack(folder / "packed" / strategy, *texts, *more)
    found["share prefixes"] = _pack(folder / "packed" / "trees", files["related"], "--share-prefixes", "4")
    for source in ("chats", "completions", "texts"):
        found[f"report {source}"] = digest(
            _run("report", files[source], "--tokenizer", tokenizer, "--max-length", "64")
        )
    found["report related"] = digest(_run("report", files["related"], "--max-length", "32", "64", "--ranks", "2"))
    loaded = AutoTokenizer.from_pretrained(tokenizer)
    to_train_on = {"chats": ("assistant", "all"), "completions": ("completion", "all"), "texts": (None,)}
    for source, choices in to_train_on.items():
        rows = datasets.load_dataset("json", data_files=files[source], split="train")
        for train_on in choices:
            found[f"tokenize {source}, {train_on}"] = digest_of_dataset(hfp.tokenize(rows, loaded, train_on=train_on))
    return found


def _pack(output: Path, *given: str) -> str:
    length = [] if "--max-length" in given else ["--max-length", "64"]
    facts = _run("pack", *given, *length, "--output", str(output))
    plan = hfp.PackingPlan.load(output / "plan")
    rows = digest_of_dataset(datasets.load_from_disk(output))
    return f"{rows} plan {plan.fingerprint[:12]} json {digest(facts)}"


def _run(*given: str) -> Any:
    with redirect_stdout(io.StringIO()) as printed:
        assert main([*given, "--json"]) == 0
    return json.loads(
        printed.getvalue(), object_hook=lambda facts: {name: facts[name] for name in facts if name not in _OF_THE_RUN}
    )


def _sources() -> dict[str, list[dict[str, Any]]]:
    rng = np.random.default_rng(0)

    def turns() -> list[dict[str, str]]:
        roles = ["user", "assistant"] * int(rng.integers(1, 4))
        return [{"role": role, "content": words(rng, 9)} for role in roles]

    return {
        "chats": [{"messages": turns()} for _ in range(60)],
        "completions": [{"prompt": words(rng), "completion": f" {words(rng)}"} for _ in range(60)],
        "texts": [{"text": words(rng, 90), "other": words(rng)} for _ in range(80)],
        "tokens": [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in documents(60) if ids],
        "related": related().to_list(),
    }
