"""Turn files, texts and chats into tokenized documents.

render.py     turn a text, a prompt with its completion, or a chat into one text, with the tokenizer's template
tokenize.py   turn texts and chats into tokens and labels
branches.py   turn chats into one document for each assistant turn
read.py       read documents of files, saved datasets and the hub, and turn them into tokens
"""

from hf_packing.checks import refuse_older

refuse_older("pyarrow", "datasets")
