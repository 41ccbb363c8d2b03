"""Compare hf_packing with TRL: the number of tokens that are trained on, and the first loss.

    python tools/labels_beside_trl.py chat.jsonl.gz --tokenizer tokenizer.json --rows 500

The same chats are trained on in four ways: as documents by SFTTrainer, as documents with `attach`, as packed rows with
`attach`, and as packed rows by SFTTrainer. The comparison runs with assistant masks, then with prompts and completions.
All figures of a table must be equal.
"""

import argparse
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback
from trl import SFTConfig, SFTTrainer

import hf_packing as hfp

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content }}<|im_end|>\n{% endgeneration %}{% else %}{{ message.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LONGEST = 8192
FIRST_STEP = 8
"""The number of documents in the first step, whose loss is compared."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="JSONL file with messages")
    parser.add_argument("--tokenizer", required=True, help="tokenizer.json with ChatML's special tokens")
    parser.add_argument("--rows", type=int, default=None, help="number of chats to read (default: all)")
    return parser.parse_args()


def with_completion(row: dict[str, Any]) -> dict[str, Any]:
    """Return a chat as prompt and completion. The completion is the last answer of the assistant."""
    last = max(turn for turn, message in enumerate(row["messages"]) if message["role"] == "assistant")
    return {"prompt": row["messages"][:last], "completion": row["messages"][last : last + 1]}


def tokenize(row: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Return the tokens of a row and the loss mask that TRL makes for the row."""
    template = tokenizer.apply_chat_template
    if "messages" in row:
        known = template(row["messages"], return_assistant_tokens_mask=True, return_dict=True)
        return {"input_ids": known["input_ids"], "assistant_masks": known["assistant_masks"]}
    prompt = template(row["prompt"], add_generation_prompt=True, return_dict=False)
    tokens = template(row["prompt"] + row["completion"], return_dict=False)
    return {"input_ids": tokens, "completion_mask": [int(place >= len(prompt)) for place in range(len(tokens))]}


def trainer_on(data: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, attach: bool, **config: Any) -> SFTTrainer:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    args = SFTConfig(
        tempfile.mkdtemp(),
        max_length=None,
        max_steps=1,
        logging_steps=1,
        per_device_train_batch_size=FIRST_STEP,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        **config,
    )
    trainer = SFTTrainer(model, args, train_dataset=data, processing_class=tokenizer)
    trainer.remove_callback(PrinterCallback)
    if attach:
        hfp.attach(trainer, hfp.TokenBudget(FIRST_STEP * LONGEST))
    elif "padding_free" in config:
        hfp.patch_model(trainer.model)
    return trainer


def trainable_tokens(trainer: SFTTrainer) -> int:
    """Return the number of trainable labels in an epoch: all except -100 and the first label of each document."""
    total = 0
    for batch in trainer.get_train_dataloader():
        labels = batch["labels"].clone()
        labels[:, 0] = -100
        if "cu_seq_lens_q" in batch:
            labels[0, batch["cu_seq_lens_q"][:-1].long()] = -100
        total += int((labels != -100).sum())
    return total


def first_loss(trainer: SFTTrainer) -> float:
    trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def compare(documents: datasets.Dataset, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> None:
    masks = documents.map(tokenize, fn_kwargs={"tokenizer": tokenizer}, remove_columns=documents.column_names)
    tokens = sum(map(len, masks["input_ids"]))
    strategy = hfp.BestFit(LONGEST)
    ways: dict[str, tuple[Callable[[range], Any], bool, dict[str, Any]]] = {
        "TRL alone": (lambda rows: documents.select(rows), False, settings),
        "attach on documents": (lambda rows: documents.select(rows), True, settings),
        "attach on packed rows": (lambda rows: hfp.pack(masks.select(rows), strategy), True, {}),
        "TRL on packed rows": (lambda rows: hfp.pack(masks.select(rows), strategy), False, {"padding_free": True}),
    }
    for name, (data, attach, config) in ways.items():
        found = trainable_tokens(trainer_on(data(range(len(documents))), tokenizer, attach, **config))
        loss = first_loss(trainer_on(data(range(FIRST_STEP)), tokenizer, attach, **config))
        print(f"  {name:22} {found:>10,} of {tokens:,} tokens ({found / tokens:.1%}), first loss {loss:.5f}")


def main() -> None:
    given = arguments()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=given.tokenizer, pad_token="<|pad|>", eos_token="<|im_end|>")
    tokenizer.chat_template = CHATML
    chats = datasets.load_dataset("json", data_files=given.data, split="train").select_columns("messages")
    chats = chats.select(range(min(given.rows or len(chats), len(chats))))
    print(f"{given.data}: {len(chats):,} chats, assistant masks")
    compare(chats, tokenizer, assistant_only_loss=True)
    print(f"{given.data}: {len(chats):,} prompts with completions")
    compare(chats.map(with_completion, remove_columns="messages"), tokenizer)


if __name__ == "__main__":
    main()
