"""Train on packed batches: `attach` for Trainer and SFTTrainer, and functions for your own training loop.

| file | content |
|---|---|
| attach.py | `attach`: checks a trainer, plans its batches, patches its models, and changes its class |
| state.py | `trainer.attached`: what `attach` has decided, and a check for changes |
| trainer.py | the methods of a trainer after `attach` |
| sources.py, whole_rows.py | what is read: packed rows, documents, trees, streams; rows that stay whole |
| streams | logical streams, in lockstep on all ranks, with one state |
| unpad.py | finds the models of a trainer; `attach` without a batching patches them, and does nothing else |
| loop.py | `prepare_dataloader` and `evaluation_loss` for your own training loop |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| resume.py | checks that a resumed run makes the steps of its checkpoint |
| ranks.py | checks that all ranks plan from the same data and settings |
| step_counts.py | counts tokens and documents for the logs, and what is predicted |
| batch_loss.py | `compute_loss`, the loss of a batch in your own training loop |
| losses.py | counts and weights of the labels of an optimizer step |
| model_loss.py, trainer_loss.py | let a model or a trainer compute its own loss, weighted by its share of the step |
| loss_units.py | says what the loss of whole rows is a mean of |
| head.py, sum_of_chunks.py | logits that are computed when they are read; in chunks for a cross-entropy |
| tree_batch.py | reads the labels of a batch: what predicts them and, in trees, which documents train on them |
| train_on_trees.py | checks that a model and a trainer take rows of trees |
| logps.py | log-probabilities of tokens, in chunks; `document_logps`, those of documents, with gradients |
| score.py | `score`: log-likelihoods and embeddings of documents, on packed rows |
| masking.py | documents that are masked anew in every epoch |
| passed_on.py | chooses columns such as weights that reach the model or the trainer's loss |
| first_batch.py | proves isolation on the first batch |
| checks.py, max_length.py | refuse unsupported trainers and arguments; refuse or count what TRL cuts or drops |
"""

from hf_packing.checks import refuse_older

refuse_older("accelerate")
