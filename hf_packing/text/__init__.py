"""Turn files, texts and chats into tokenized documents.

files.py           find the files that a path or a pattern names
documents.py       read documents from files; report the file and the line of documents that cannot be read
rendering.py       turn messages, or a prompt and a completion, into one text, with the tokenizer's template
tokenize.py        tokenize a dataset
text_tokenizer.py  turn texts into tokens
branches.py        turn chats into one document for each assistant turn
corpus.py          read, render and tokenize documents block by block, for the command and the recipes
"""

from hf_packing.versions import refuse_older

refuse_older("pyarrow", "datasets")
