"""Turn documents into packed rows, and packed rows back into documents.

pack.py            pack a whole dataset
unpack.py          restore the documents of a packed dataset
map_batch.py       pack one batch of `datasets.map`
token_columns.py   choose the columns to pack, and read their token lists as NumPy arrays
label_counts.py    count the labels that are left after documents were cut or dropped
packed_rows.py     build packed rows from documents according to a plan; restore the documents
packing_trace.py   say in the description of a dataset that it is packed, and refuse packed rows without borders
cache.py           store packed rows on disk with the data that `unpack` needs; remove files of killed processes
lazy/              pack without a copy of the tokens
"""

from hf_packing.checks import refuse_older

refuse_older("pyarrow", "datasets")
