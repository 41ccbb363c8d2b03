"""Trainers of whole rows or with batches of their own, and runs and steps of them on one or more processes.

Every process writes the rows of each of its micro-batches into FOLDER/NAME/rows-RANK.jsonl, one line for a micro-batch,
and rank 0 writes the parameters after training into FOLDER/NAME/parameters.pt.
"""

import copy
import json
import os
import signal

import datasets
import numpy as np
import torch
import transformers
import trl
from accelerate import PartialState
from patched_models import patched_once
from trainers import arguments as usual_arguments
from trainers import tokenizer
from training_by_hand import gradients_of
from transformers import DataCollatorForTokenClassification, DataCollatorWithPadding, Trainer, TrainerCallback

import hf_packing as hfp
from tools.tiny_model import tiny_model

WORDS = 128
ROWS = 66
BUDGET = {"classifier": 64, "tokens": 64, "dpo": 140, "reward": 140}
LEARNING_RATE = 1e-2
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}


def drawn(seed):
    rng = np.random.default_rng(seed)
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.8, ROWS), 2, 60).astype(int)
    return rng, [rng.integers(5, 120, length).tolist() for length in lengths]


def classified():
    rng, tokens = drawn(1)
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": rng.integers(0, 3, ROWS).tolist()})


def tagged():
    _, tokens = drawn(2)
    labels = [[t % 3 if t % 4 else -100 for t in row] for row in tokens]
    labels[0] = [-100] * len(labels[0])
    return datasets.Dataset.from_dict({"input_ids": tokens, "labels": labels})


def answered():
    rng, tokens = drawn(3)
    starts, ends = [int(rng.integers(0, len(row))) for row in tokens], [len(row) - 1 for row in tokens]
    return datasets.Dataset.from_dict({"input_ids": tokens, "start_positions": starts, "end_positions": ends})


def texts(number, seed=0, **columns):
    rng = np.random.default_rng(seed)

    def text(mean):
        return " ".join(f"w{word}" for word in rng.integers(8, 120, rng.integers(1, 2 * mean)))

    return datasets.Dataset.from_list([{name: text(mean) for name, mean in columns.items()} for _ in range(number)])


def pairs(number=6, **means):
    rows = texts(number, **{"seed": 4, "prompt": 9, "chosen": 12, "rejected": 5, **means})
    forms = {"prompt": "{} w3", "chosen": " {}", "rejected": " {}"}
    return rows.map(lambda row: {name: form.format(row[name]) for name, form in forms.items()})


def paired():
    return [{"number": n, **row} for n, row in enumerate(pairs(ROWS))]


def arguments(folder, kind, **changes):
    steps = {"max_steps": 3, "per_device_train_batch_size": 6, "gradient_checkpointing": False, "max_grad_norm": 0}
    descent = {"learning_rate": LEARNING_RATE, "optim": "sgd", "lr_scheduler_type": "constant"}
    return usual_arguments(folder, kind, **steps | descent | changes)


def bert(auto, dtype=torch.float64, dropout=0.0, **changes):
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = transformers.BertConfig(vocab_size=WORDS, **SIZES, **drops, **changes)
    return getattr(transformers, f"BertFor{auto}")(config).to(dtype)


def llama(auto, dtype=torch.float64, **changes):
    config = transformers.LlamaConfig(vocab_size=WORDS, pad_token_id=0, **SIZES, **changes)
    return getattr(transformers, f"LlamaFor{auto}")(config).to(dtype)


def trainer_of(kind, folder, data=None, dropout=0.0, dtype=torch.float64, patched=False, **changes):
    """A trainer without attach: a classifier, a tagger of tokens, one that answers questions, DPO or a reward model.
    With patched=True, its models are patched and proven already."""

    def model_of(make, *given, seed=0, **options):
        torch.manual_seed(seed)
        model = make(*given, dtype, **options)
        if patched:
            proven = copy.deepcopy(patched_once(make, False, *given, dtype, **options))
            proven.load_state_dict(model.state_dict())
            return proven
        return model

    if kind in ("classifier", "tokens", "answers"):
        auto, rows, labels = {
            "classifier": ("SequenceClassification", classified, {"num_labels": 3}),
            "tokens": ("TokenClassification", tagged, {"num_labels": 3}),
            "answers": ("QuestionAnswering", answered, {}),
        }[kind]
        collator = DataCollatorForTokenClassification if kind == "tokens" else DataCollatorWithPadding
        model = model_of(bert, auto, dropout=dropout, **labels)
        config = arguments(folder, transformers.TrainingArguments, **changes)
        return Trainer(model, config, train_dataset=data or rows(), data_collator=collator(tokenizer()))
    data = datasets.Dataset.from_list(data or paired())
    if kind == "reward":
        data = data.map(lambda row: {name: row["prompt"] + row[name] for name in ("chosen", "rejected")})
        config = arguments(folder, trl.RewardConfig, **{"max_length": None, **changes})
        model = model_of(llama, "SequenceClassification", num_labels=1)
        return trl.RewardTrainer(
            model, args=config, train_dataset=data.remove_columns("prompt"), processing_class=tokenizer()
        )
    model, reference = model_of(llama, "CausalLM"), model_of(llama, "CausalLM", seed=1)
    config = arguments(folder, trl.DPOConfig, **{"max_length": None, **changes})
    return trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer(), ref_model=reference)


class ExactLogProbs:
    """In place of `_ChunkedLogProbFunction` of TRL, which computes in float32, so that losses of DPO are exact."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, _, __, ___, ____):
        assert bias is None
        log_probs = (hidden @ weight.T / temperature).log_softmax(-1)
        of_labels = log_probs.gather(1, labels[:, None])[:, 0]
        zeros = of_labels.detach() * 0
        return of_labels, zeros, zeros, zeros, zeros.bool()


class Recorded:
    """A collator that writes the first tokens of each row into a file, once it is told to."""

    def __init__(self, collate):
        self.collate, self.file = collate, None

    def __call__(self, rows):
        if self.file is not None:
            self.file.write(json.dumps([key(row) for row in rows]) + "\n")
            self.file.flush()
        return self.collate(rows)


def key(row):
    return [row[name][-20:] if isinstance(row[name], list) else row[name] for name in sorted(row) if name != "margin"]


class KilledAt(TrainerCallback):
    """Kills the process in a step after a checkpoint, when all ranks have written it."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, _, state, __, **___):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def by_hand(kind, folder, steps):
    """Parameters after steps of the stock trainer's loss, unpatched and padded, on rows given by their keys."""
    trainer = trainer_of(kind, folder)
    rows = {json.dumps(key(row)): row for row in trainer.get_train_dataloader().dataset}
    for step in steps:
        batch = trainer.data_collator([rows[json.dumps(each)] for each in step])
        after_a_step(trainer.model, trainer.compute_loss(trainer.model.train(), batch))
    return trainer.model.state_dict()


def after_a_step(model, loss):
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= LEARNING_RATE * parameter.grad
    return model.state_dict()


def read_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_all(folder, runs):
    trl.trainer.utils._ChunkedLogProbFunction = ExactLogProbs
    for name, run in runs.items():
        train(folder / name, run)


def train(into, run):
    settings = {"kind": "classifier", "kill": 0, "resume": False, "dropout": 0.0} | run
    kind, kill, resume, dropout = (settings.pop(each) for each in ("kind", "kill", "resume", "dropout"))
    into.mkdir(parents=True, exist_ok=True)
    trainer = trainer_of(kind, into / "checkpoints", dropout=dropout, **settings)
    trainer.data_collator = recorded = Recorded(trainer.data_collator)
    hfp.attach(trainer, hfp.TokenBudget(BUDGET[kind]))
    if kill:
        trainer.add_callback(KilledAt(kill))
    with (into / f"rows-{PartialState().process_index}.jsonl").open("a") as recorded.file:
        trainer.train(resume_from_checkpoint=resume or None)
    if PartialState().process_index == 0:
        torch.save(trainer.model.state_dict(), into / "parameters.pt")
    PartialState().wait_for_everyone()
    trainer.accelerator.free_memory()


def moved(model):
    """A reference model that differs from the policy."""
    other = copy.deepcopy(model)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return other


def step(trainer):
    """The loss and the gradients of the first batch."""
    torch.manual_seed(0)
    batch = next(iter(trainer.get_train_dataloader()))
    trainer.model.train().zero_grad()
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), gradients_of(trainer.model)


def policy(name="gpt2"):
    return tiny_model(name, "causal", torch.float64).train()


def grpo(folder, model):
    sizes = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2}
    return trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        args=arguments(folder, trl.GRPOConfig, **sizes),
        train_dataset=texts(4, prompt=9),
        processing_class=tokenizer(),
    )


def answers(prompts, completions):
    """A batch as GRPO makes them, 21 tokens wide: 12 of prompts padded on the left, 9 of completions on the right."""
    ids, mask = torch.zeros(len(prompts), 21, dtype=torch.long), torch.zeros(len(prompts), 21, dtype=torch.long)
    for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        place = slice(12 - len(prompt), 12 + len(completion))
        ids[number, place], mask[number, place] = torch.tensor(prompt + completion), 1
    return ids, mask


def dpo(folder, model, data=None, **changes):
    config = arguments(folder, trl.DPOConfig, max_length=None, **changes)
    reference = None if hasattr(model, "peft_config") else moved(model)
    data = pairs() if data is None else data
    return trl.DPOTrainer(model, args=config, train_dataset=data, processing_class=tokenizer(), ref_model=reference)
