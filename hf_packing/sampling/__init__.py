"""Group the rows of a dataset into micro-batches, for every rank and every epoch.

A row is one document, or a pack of several documents. The sizes of all rows are measured first. A batching, such as
TokenBudget, then cuts, drops or refuses rows that are too long for a micro-batch, and plans every epoch. The plan is a
pure function of the sizes, the seed, the epoch, the number of ranks and the gradient accumulation. Which rows are in an
optimizer step depends only on the product of the last two. The rows are read in the order of the plan:

    dataset -> RowSizes -> Batching.fit -> FittedRows -> Batching.plan_fitted -> EpochPlan -> RankBatchSampler -> rows

row_sizes.py      measures the size of every row: tokens, segments, attention cost, bucket
large_rows.py     cuts rows that are too large for a micro-batch, or leaves them out
data_facts.py     facts about a dataset; ranks compare these facts to detect different datasets
epoch_plan.py     Batching, the base class of all batchings; Epoch, FittedRows and EpochPlan
best_fit.py       puts rows into as few micro-batches as possible, within limits of tokens and documents
fill.py           puts rows into a given number of micro-batches, with equal work on all ranks
token_budget.py   TokenBudget, which limits the tokens of a micro-batch
bucket_batches.py BucketBatches, for rows that were packed in buckets
within_limits.py  limits a batching to fixed shapes; FilledInOrder, for evaluation with fixed shapes
steps_of_epochs.py the optimizer steps of each epoch of a run, to find its place in the data
sampler.py        RankBatchSampler, for a DataLoader; InOrder, for evaluation
epoch_summary.py  EpochSummary, the counts of an epoch
sampled_rows.py   reads the rows that a sampler selects
kept_labels.py    counts the labels in these rows
"""

from hf_packing.checks import refuse_older

refuse_older("torch")
