"""Batches and losses that are right on any number of processes, for Trainer, SFTTrainer and loops of one's own.

model_cost.py       how much of a model's work grows with tokens, how much with pairs of them
losses.py           mean over tokens or over documents, whatever the split into ranks and accumulation
loss_of_model.py    how a model makes its own loss, asked once
trainer_loss.py     whether a trainer's own loss is divided by what is in a step, asked once
isolate.py          a model patched as it will run
compute_loss.py     the loss of a batch in a loop of one's own
agreement.py        all ranks plan from the same data and settings, or none goes on
ranks.py            which processes train on the same rows, and what of accelerate cannot be served
rows_loader.py      a DataLoader of one rank, from a sampler
packed_loader.py    the batches of one rank in a loop of one's own
loop.py             prepare_dataloader: makes them
evaluation.py       the mean loss over the tokens of a dataset
loss_masks.py       which loss masks a trainer applies
refusals.py         trainers whose batches or losses are their own
trl_head.py         the log-probabilities of SFTTrainer's fused head
step_facts.py       what steps are made of, for a trainer's logs
settled.py          who makes a trainer's loss, and what may change after attach
planned_batches.py  what attach keeps for a trainer, and its loaders
trainer.py          what attach puts before a trainer's own methods
progress.py         what a checkpoint says of batches, and refusing another run's
summary.py          steps, documents and tokens of an epoch
attach.py           attach
"""
