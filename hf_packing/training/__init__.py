"""Train on packed batches: `attach` for Trainer and SFTTrainer, and functions for your own training loop.

| file | content |
|---|---|
| attach.py | `attach`, which plans batches and patches the model |
| packed_trainer.py | `PackedTrainer`, the trainer's class after attach |
| loop.py | `prepare_dataloader` and `evaluation_loss` for your own training loop |
| batch_loss.py | `compute_loss`, the loss of a batch in your own training loop |
| unpad_models.py | `attach` without a batching: patches the models of a trainer that makes its own padded batches |
| whole_row_trainer.py | `attach` for heads, pairs and pictures, whose rows stay whole; `WholeRowTrainer` |
| planned_rows.py, whole_rows.py | the state of such a trainer; reads, measures and loads whole rows |
| loss_units.py | says what a loss is a mean of |
| masked_documents.py, masking.py, drawn_masks.py | documents that are masked anew in every epoch |
| score.py | `score`: log-likelihoods and embeddings of documents, on packed rows |
| planned_batches.py | the state and the loaders of a trainer after `attach` |
| streams | the same for streams: logical streams, in lockstep on all ranks, with one state |
| passed_on.py | chooses columns such as weights that reach the model or the trainer's loss |
| loader.py | the DataLoader of one rank, and `PackedLoader` |
| losses.py | counts and weights of the labels of an optimizer step |
| model_loss.py | lets a model compute its own loss, and finds out how it does that |
| trainer_loss.py | lets a trainer compute its own loss, as a part of the loss of the optimizer step |
| head.py, sum_of_chunks.py | logits that are computed when they are read; in chunks for a cross-entropy |
| tree_batch.py | reads the labels of a batch: what predicts them and, in trees, which documents train on them |
| logps.py | log-probabilities of tokens, in chunks; `document_logps`, those of documents, with gradients |
| checks.py | refuses unsupported trainers, arguments and accelerators; checks labels against loss masks and tokens |
| max_length.py | refuses or counts what trainers of TRL cut or drop |
| router_padding.py | refuses fixed shapes for a model whose routers would learn from padding |
| ranks.py | checks that all ranks agree, and that a resumed run matches its checkpoint; counts tokens for the logs |
"""

from hf_packing.checks import refuse_older

refuse_older("accelerate")
