"""Group the rows of a dataset into micro-batches, for every rank and every epoch.

A row is one document, or a pack of several documents. The sizes of all rows are measured first. A batching, such as
TokenBudget, then cuts, drops or refuses rows that are too long for a micro-batch, and plans every epoch. The plan is a
pure function of the sizes, the seed, the epoch, the number of ranks and the gradient accumulation. Which rows are in an
optimizer step depends only on the product of the last two. The rows are read in the order of the plan:

    dataset -> RowSizes -> Batching.fit -> FittedRows -> Batching.plan_fitted -> EpochPlan -> RankBatchSampler -> rows

sizes.py          measures the size of every row: tokens, segments, attention cost, bucket; facts that ranks compare
batching.py       Batching, the base class of all batchings; Epoch, FittedRows and EpochPlan
fill.py           puts rows into micro-batches, few or a given number, with equal work on all ranks
token_budget.py   TokenBudget, which limits the tokens of a micro-batch, and cuts or leaves out rows that are too large
bucket_batches.py BucketBatches, for rows that were packed in buckets
evaluation.py     InOrder, for evaluation
sampler.py        RankBatchSampler, for a DataLoader; EpochSummary, the counts of an epoch
rows.py           reads the rows that a sampler selects, finds their trees, and counts the labels in them
"""

from hf_packing.checks import refuse_older

refuse_older("torch")
