"""Turn documents into packed rows, and packed rows back into documents.

pack.py            pack a whole dataset
packing.py         how documents become rows: plan them, then build the rows
packed_rows.py     build packed rows from documents according to a plan
lazy.py            rows that are built when they are read
map_batch.py       pack one batch of `datasets.map`
unpack.py          restore the documents of a packed dataset
token_columns.py   choose the columns to pack, and read their token lists as NumPy arrays
changes.py         what packing did to documents, as counts and as texts for warnings
packing_trace.py   say in the description of a dataset that it is packed, and refuse packed rows without borders
cache.py           store packed rows on disk with the data that `unpack` needs
"""

from hf_packing.checks import refuse_older

refuse_older("pyarrow", "datasets")
