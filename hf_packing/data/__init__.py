"""Documents into packed rows, and back: everything between a tokenized dataset and the rows of a packed one.

pack.py            pack a whole dataset; unpack it
map_batch.py       pack one batch of `datasets.map`
token_columns.py   which columns are packed, and their token lists as NumPy arrays
packed_rows.py     gather packed rows from documents by a plan; restore the documents
loss_masks.py      TRL's loss masks, applied to labels
segments.py        where the segments of given rows are
cache.py           packed rows on disk, with what is needed to unpack them
unfinished.py      files that are still being written, and what killed processes left behind
"""
