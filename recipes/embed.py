"""Train sentence embeddings with SentenceTransformerTrainer, whose encoder does not compute the padding.

    python recipes/embed.py --data pairs.jsonl --model sentence-transformers/all-MiniLM-L6-v2
    torchrun --nproc-per-node 2 recipes/embed.py --data pairs.jsonl --num_train_epochs 3

Rows have an `anchor` and the `positive` text that belongs to it; the other texts of a batch are the negatives. Without
--data, the anchors are first lines of docstrings in the Python standard library, and the positives are the functions
without the docstrings. Without --model, a small BERT is trained from scratch.

Needs sentence-transformers: pip install "hf-packing[embed]". The flags are those below, and those of its
SentenceTransformerTrainingArguments. Batches are those of its trainer, and not of a token budget, since the loss
compares each anchor with all texts of its batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import common
from sentence_transformers import (  # pip install "hf-packing[embed]"
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from transformers import HfArgumentParser

import hf_packing as hfp

COLUMNS = ("anchor", "positive")


@dataclass
class Arguments:
    data: str | None = common.flag(None, "file, folder or name of the pairs; see above")
    eval_data: str | None = common.flag(None, "pairs to evaluate on, or else a tenth of --data")
    model: str | None = common.flag(None, "name or folder, or else a small BERT from scratch")
    max_length: int = common.flag(256, "longer texts are truncated, and counted")


def main(flags: Sequence[str] | None = None) -> dict[str, float]:
    kinds = (Arguments, SentenceTransformerTrainingArguments)
    parser = HfArgumentParser(kinds, description=__doc__, formatter_class=common.Help)
    parser.set_defaults(output_dir="outputs/embed", learning_rate=5e-4, logging_steps=10, **common.on_cpu())
    parser.set_defaults(per_device_train_batch_size=64, batch_sampler="no_duplicates")
    given, args = parser.parse_args_into_dataclasses(flags)
    checkpoint = common.checkpoint_of(args)
    with args.main_process_first():
        train, test = common.train_and_test(given.data, given.eval_data, COLUMNS, common.described)
        name = given.model or common.save_small(f"{args.output_dir}/small", train["positive"], encoder=True)
    model = SentenceTransformer(name)
    model.max_seq_length = given.max_length
    texts = [*train["anchor"], *train["positive"]]
    masks = (model.preprocess(texts[n : n + 1000])["attention_mask"] for n in range(0, len(texts), 1000))
    at_limit = sum(int((mask.sum(1) >= given.max_length).sum()) for mask in masks)
    hfp.patch_model(model[0].auto_model)
    queries, corpus = ({str(n): text for n, text in enumerate(test[column])} for column in COLUMNS)
    evaluator = InformationRetrievalEvaluator(queries, corpus, {number: {number} for number in queries})
    trainer = SentenceTransformerTrainer(
        model, args, train_dataset=train, loss=MultipleNegativesRankingLoss(model), evaluator=evaluator
    )
    say = trainer.accelerator.print
    say(f"{at_limit:,} of {len(texts):,} texts have {given.max_length} tokens or are truncated to it")
    say(hfp.check_isolation(model[0].auto_model).route.describe())
    trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = evaluator(model)
    say(f"{metrics['cosine_accuracy@1']:.1%} of {len(test):,} anchors are closest to their own text among all of them")
    trainer.save_model()
    return metrics


if __name__ == "__main__":
    common.run(main)
