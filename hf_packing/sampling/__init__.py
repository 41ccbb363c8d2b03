"""Decide which rows share a micro-batch, on every rank and in every epoch, as a pure function of the rows' lengths.

The sizes of a dataset's rows are measured first. A batching then fits the rows to micro-batches and plans every epoch.
The rows are read in the order of the plan:

    dataset -> RowSizes -> Batching.fit -> FittedRows -> Batching.plan_fitted -> EpochPlan -> RankBatchSampler -> rows

row_sizes.py      measures the size of every row: tokens, segments, attention cost, bucket
data_facts.py     facts that ranks compare to detect that their datasets differ
epoch_plan.py     Batching, the interface of all batchings, with Epoch, FittedRows and EpochPlan
fill.py           puts rows into a given number of micro-batches, with equal work on all ranks
token_budget.py   TokenBudget, built on fill.py; the cost of linear layers in a model
bucket_batches.py BucketBatches, built on fill.py
sampler.py        the micro-batches of one rank, for a DataLoader; InOrder, for evaluation; EpochSummary
sampled_rows.py   reads the rows that a sampler selects
"""
