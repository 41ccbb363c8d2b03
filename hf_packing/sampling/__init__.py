"""Which rows share a micro-batch, on every rank and in every epoch, as a pure function of their lengths.

A dataset's rows are measured without being read, fitted to a batching, planned epoch by epoch, and read as planned:

    dataset -> RowSizes -> Batching.fit -> FittedRows -> Batching.plan_fitted -> EpochPlan -> RankBatchSampler -> rows

row_sizes.py      the size of every row: tokens, segments, attention cost, bucket
data_facts.py     facts that ranks compare, to detect that their datasets differ
epoch_plan.py     Batching, with the types that it takes and returns: Epoch, FittedRows, EpochPlan
fill.py           rows -> the requested number of micro-batches, with equal work on all ranks
token_budget.py   TokenBudget, on top of fill; what a token costs in a model
bucket_batches.py BucketBatches, on top of fill
sampler.py        the micro-batches of one rank, for a DataLoader; InOrder, for evaluation; EpochSummary
sampled_rows.py   reads the rows that a sampler asks for
"""
