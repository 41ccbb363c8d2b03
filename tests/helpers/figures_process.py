"""Train, evaluate and predict on 23 documents with an attached trainer, and write the figures that it reports.

torchrun --nproc-per-node 2 figures_process.py FOLDER ROWS_PER_BATCH
"""

import json
import os
import sys
from pathlib import Path

from process_group import end_process_group
from trainers import trainer_of
from training_process import documents, tokenizer

import hf_packing as hfp


def main(folder, rows):
    data, seen = documents(23), []

    def metrics(predicted):
        seen.append([len(predicted.predictions), *(int((row != -100).sum()) for row in predicted.label_ids)])
        return {}

    trainer = trainer_of(
        folder / "trainer",
        data=data,
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2 // int(os.environ.get("WORLD_SIZE", "1")),
        per_device_eval_batch_size=rows,
        include_num_input_tokens_seen="non_padding",
    )
    trainer.processing_class, trainer.compute_metrics = tokenizer(), metrics
    hfp.attach(trainer, hfp.TokenBudget(64))
    speed = trainer.train().metrics
    loss = trainer.evaluate(data)["eval_loss"]
    predicted = trainer.predict(data)
    labels = [row[row != -100].tolist() for row in predicted.label_ids]
    rank = trainer.args.process_index
    facts = {
        "labels": labels,
        "loss": loss,
        "seen_by_metrics": seen,
        "documents": round(predicted.metrics["test_samples_per_second"] * predicted.metrics["test_runtime"]),
        "num_tokens_seen": trainer.state.num_input_tokens_seen,
        "trained_documents": speed["train_samples_per_second"] * speed["train_runtime"],
    }
    (folder / f"facts-{rank}.json").write_text(json.dumps(facts))
    assert len(predicted.predictions) == len(labels)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    end_process_group()
