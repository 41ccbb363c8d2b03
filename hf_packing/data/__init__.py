"""Turn documents into packed rows, and back: everything between a tokenized dataset and the rows of a packed one.

pack.py            pack a whole dataset; unpack it
map_batch.py       pack one batch of `datasets.map`
token_columns.py   which columns are packed, and their token lists as NumPy arrays
packed_rows.py     gather packed rows from documents by a plan; restore the documents
cache.py           packed rows on disk, with what `unpack` needs; cleanup after killed processes

Before that, files become documents and documents become tokens:

files.py           which files a path or a pattern names
documents.py       read the documents in them, and report the line of any that cannot be read
rendering.py       render messages, prompts and texts with the tokenizer's template
tokenize.py        texts become tokens
corpus.py          all of it together, for the command and the recipes
"""
