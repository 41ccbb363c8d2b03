"""Packed rows without a copy of the tokens: a row is read from the documents' own Arrow files when it is needed.

These are the files, each of which imports only those above it:

upstream.py          ask datasets for the files behind a table, and register a feature
token_files.py       read slices of the tokens of documents from Arrow files
find_tokens.py       find where the tokens of a dataset lie in its Arrow files
stored_packs.py      write, check and open the folder of a plan on disk
packed_tokens.py     PackedTokens, the feature of datasets whose cell is the number of a pack
lazy_columns.py      read columns of lazy packs without the formatting of datasets
write_lazy_packs.py  write the packs of a plan, for `pack`
restore.py           restore the documents of lazy packs, for `unpack`
"""
