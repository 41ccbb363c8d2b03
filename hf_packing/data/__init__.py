"""Documents into packed rows, and back: everything between a tokenized dataset and the rows of a packed one.

pack.py            pack a whole dataset; unpack it
map_batch.py       pack one batch of `datasets.map`
token_columns.py   which columns are packed, and their token lists as NumPy arrays
packed_rows.py     gather packed rows from documents by a plan; restore the documents
cache.py           packed rows on disk, with what is needed to unpack them; what killed processes left behind

Before that, files become documents and documents become tokens:

files.py           which files a path or a pattern names
documents.py       their documents, read by `datasets`, with the line of a document that cannot be read
rendering.py       messages, prompts and texts, as the tokenizer's template renders them
tokenize.py        texts become tokens
corpus.py          all of it together, for the command and the recipes
"""
