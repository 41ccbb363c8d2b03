"""Train on packed batches: `attach` for Trainer and SFTTrainer, and functions for your own training loop.

| file | content |
|---|---|
| attach.py | `attach`: checks a trainer, plans its batches, patches its models, and changes its class |
| state.py | `trainer.attached`: what `attach` has decided, and a check for changes |
| trainer.py, resume.py | the methods of a trainer after `attach`; its checkpoints |
| checks.py | refuses trainers, arguments and labels that are not supported; refuses or counts what TRL cuts or drops |
| models.py | finds and patches the models of a trainer, checks what trees need |
| first_batch.py | proves isolation and the step on the first batch |
| step.py, step_cases.py | compare a packed step with the unpacked one; how trainers and loops make both |
| sources.py | what is read: packed rows, documents, trees, streams |
| whole_rows.py, loss_unit.py | rows that stay whole; what their loss is a mean of |
| streams.py, lockstep.py | logical streams, in lockstep on all ranks, with one state |
| masking.py | documents that are masked anew in every epoch |
| ranks.py | checks that all ranks plan from the same data and settings |
| loop.py | `prepare_dataloader`, `compute_loss` and `evaluation_loss` for your own training loop |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| step_counts.py | counts tokens and documents for the logs, and what is predicted |
| losses.py | the one rule of all losses; the keys of a batch for its loss; the mean of an evaluation |
| kinds/ | the labels of each kind of batch: what predicts them, what they weigh, whose they are; parts of rows |
| model_loss.py | lets a model or a trainer compute its own loss, weighted by its share of the step |
| head.py, sum_of_chunks.py | logits that are computed when they are read; in chunks for a cross-entropy |
| leveling.py | exchanges rows of GRPO, RLOO and KTO between ranks and micro-batches, so that all have equal work |
| score.py | `document_logps`, with gradients; `score`, log-likelihoods and embeddings on packed rows |
"""

from hf_packing.checks import refuse_older

refuse_older("accelerate")
