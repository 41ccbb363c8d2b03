"""Which rows share a micro-batch, on every rank and in every epoch, as a pure function of their lengths.

sizes.py          what is known of rows: tokens, cost of attention, bucket
data_facts.py     what tells the data of one rank from that of another
pieces.py         documents longer than the budget become pieces
epoch_plan.py     the micro-batches of all ranks in one epoch, and how even they are
fill.py           rows -> exactly as many micro-batches as wanted, none over the budget
level.py          which micro-batches run at the same time, and on which rank
redeal.py         rows dealt again among the micro-batches of a step
schedule.py       steps that have as many documents as without packing
in_order.py       rows in the order of the dataset, for evaluation
batching.py       what TokenBudget and BucketBatches have in common
token_budget.py   TokenBudget
bucket_batches.py BucketBatches
sampler.py        the micro-batches of one rank, for a DataLoader
rows.py           the rows of a dataset as a sampler asks for them
"""
