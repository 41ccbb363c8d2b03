"""Which rows share a micro-batch, on every rank and in every epoch, as a pure function of their lengths.

A dataset's rows are measured without being read, fitted to a batching, planned epoch by epoch, and read as planned:

    dataset -> RowSizes -> Batching.fit -> FittedRows -> Batching.plan_fitted -> EpochPlan -> RankBatchSampler -> rows

row_sizes.py      what is known of rows: tokens, segments, attention cost, bucket
data_facts.py     what ranks compare, to notice that their datasets differ
epoch_plan.py     Batching, Epoch and EpochPlan: what batchings take and return
fill.py           rows -> exactly as many micro-batches as wanted, with equal work on all ranks
token_budget.py   TokenBudget, on top of fill; what a token costs in a model
bucket_batches.py BucketBatches, on top of fill
sampler.py        the micro-batches of one rank, for a DataLoader; InOrder, for evaluation; EpochSummary
sampled_rows.py   the rows of a dataset as a sampler asks for them
"""
