"""Measure, for models of each architecture and head, how a packed step of a trainer differs from the unpacked one.

A stock trainer is attached, and proves its step on the first batch. Nothing is to be refused that isolates documents.
"""

import copy
import tempfile
import warnings
from dataclasses import dataclass, replace
from typing import Any, Literal

import datasets
import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForMultipleChoice,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)

from hf_packing import ModelNotSupportedError, PackingError, TokenBudget, attach
from tools.internals import StepReport
from tools.survey.heads import _SETTINGS, head_jobs
from tools.survey.measure import VARIANTS, all_jobs, in_processes
from tools.tiny_model import VOCABULARY, tiny_model

DTYPES = ("float32", "bfloat16")

BATCHINGS = ("tokens", "own")
"""A TokenBudget, or the trainer's own batches without their padding."""

BUDGET = 1024
"""Number of tokens in a batch."""

_ROWS = 64

_LENGTHS, _LONGER = (4, 60), (20, 60)
"""Smallest and largest number of tokens in a document, and those for models that take no short ones."""

Status = Literal[
    "proven", "not compared", "refused", "FALSE ALARM", "not trained without packing", "not built", "no proof"
]


@dataclass(frozen=True)
class StepJob:
    """A step to measure."""

    kind: str
    name: str
    dtype: str
    batching: str = "tokens"


@dataclass(frozen=True)
class MeasuredStep:
    """What a proof of the step has found."""

    job: StepJob
    status: Status
    reason: str = ""
    loss: float = float("nan")
    """The difference of the losses, as a share of the loss."""
    gradient: float = float("nan")
    """The value of `StepReport.difference`."""
    note: str = ""


def step_jobs() -> list[StepJob]:
    """Return jobs for every architecture, variant and head, in both dtypes; models of tokens with a budget alone."""
    of_tokens = [(kind, name, "tokens") for kind, name in all_jobs()]
    of_heads = [(head, name, batching) for head, name in head_jobs() for batching in BATCHINGS]
    return [StepJob(kind, name, dtype, how) for kind, name, how in of_tokens + of_heads for dtype in DTYPES]


def measure_all_steps(jobs: list[StepJob], processes: int) -> list[MeasuredStep]:
    """Measure jobs in several processes; return the results in their order."""
    return in_processes(measure_step, jobs, processes, " steps")


def measure_step(job: StepJob) -> MeasuredStep:
    """Build a tiny model and train it for a step after `attach`, and without it if the step is refused."""
    model_type, changes = VARIANTS.get(job.name, (job.name, _SETTINGS.get(job.name, {})))
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            untouched = tiny_model(model_type, job.kind, getattr(torch, job.dtype), **changes)
        except Exception as error:  # configurations and models may raise anything
            return MeasuredStep(job, "not built", f"{type(error).__name__}: {error}")
        for lengths in (_LENGTHS, _LONGER):
            found = _measure_model(job, copy.deepcopy(untouched), lengths)
            if found.status in ("proven", "not compared", "refused"):
                break
            try:
                with tempfile.TemporaryDirectory() as folder:
                    trainer_of(job, copy.deepcopy(untouched), folder, lengths).train()
                break
            except Exception as error:
                found = replace(found, status="not trained without packing", reason=f"{type(error).__name__}: {error}")
        return found


def _measure_model(job: StepJob, model: PreTrainedModel, lengths: tuple[int, int]) -> MeasuredStep:
    with tempfile.TemporaryDirectory() as folder:
        trainer: Any = trainer_of(job, model, folder, lengths)
        status: Status
        try:
            attach(trainer, TokenBudget(BUDGET) if job.batching == "tokens" else None)
        except (ModelNotSupportedError, PackingError) as error:
            return MeasuredStep(job, "refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return MeasuredStep(job, "FALSE ALARM", f"attach: {type(error).__name__}: {error}")
        try:
            trainer.train()
        except (ModelNotSupportedError, PackingError) as error:
            status = "FALSE ALARM" if "got not the step" in str(error) else "refused"
            return MeasuredStep(job, status, f"{type(error).__name__}: {error}")
        except Exception as error:  # the first one to tell of a difference
            return MeasuredStep(job, "FALSE ALARM", f"{type(error).__name__}: {error}")
        proofs = trainer.attached.first_batch_proof.proofs.values()
        for report in (each for each in proofs if isinstance(each, StepReport)):
            apart = abs(report.loss - report.unpacked_loss) / abs(report.unpacked_loss)
            status = "proven" if report.compared else "not compared"
            return MeasuredStep(job, status, "", apart, report.difference, report.note)
        return MeasuredStep(job, "no proof")


def trainer_of(job: StepJob, model: PreTrainedModel, folder: str, lengths: tuple[int, int]) -> Trainer:
    """Return a stock trainer of uneven documents of random tokens, a third of them without labels in each document."""
    arguments = TrainingArguments(
        folder,
        max_steps=1,
        per_device_train_batch_size=8,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    collators: dict[str, Any] = {
        "causal": DataCollatorForSeq2Seq,
        "masked": DataCollatorForLanguageModeling,
        "sequence classification": DataCollatorWithPadding,
        "question answering": DataCollatorWithPadding,
        "token classification": DataCollatorForTokenClassification,
        "multiple choice": DataCollatorForMultipleChoice,
    }
    rows = datasets.Dataset.from_list(_rows(job.kind, model, lengths))
    collate = collators[job.kind](_tokenizer())
    trainer = Trainer(model, arguments, train_dataset=rows, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    return trainer


def _tokenizer() -> PreTrainedTokenizerFast:
    special = {"pad_token": "0", "bos_token": "1", "eos_token": "2", "sep_token": "3", "mask_token": "4"}
    words = models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="5")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="5", **special)


def _rows(kind: str, model: PreTrainedModel, lengths: tuple[int, int]) -> list[dict[str, Any]]:
    rng, rows = np.random.default_rng(0), []
    for _ in range(_ROWS):
        ids = rng.integers(8, VOCABULARY - 8, rng.integers(lengths[0], lengths[1] + 1)).tolist()
        if "classification" in kind and model.config.is_encoder_decoder:  # such as BART, which reads the end token
            ids[-1] = model.config.eos_token_id
        row: dict[str, Any] = {"input_ids": ids}
        if kind == "causal":
            row["labels"] = [-100] * (len(ids) // 3) + ids[len(ids) // 3 :]
        elif kind == "token classification":
            row["labels"] = [token % 2 if token % 3 else -100 for token in ids]
        elif kind == "sequence classification":
            row["labels"] = ids[0] % 2
        elif kind == "question answering":
            row |= {"start_positions": len(ids) // 3, "end_positions": len(ids) - 1}
        elif kind == "multiple choice":
            row = {"input_ids": [ids, ids[::-1] + ids[:3]], "labels": ids[0] % 2}
        rows.append(row)
    return rows
