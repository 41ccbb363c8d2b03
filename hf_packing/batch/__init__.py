"""Make one batch, of shape [1, tokens] with the borders between its segments, from packed rows or documents.

collate.py   PackingCollator: join rows to a batch, and find the borders between segments; how a batch leaves a worker
segments.py  columns of segments: check them against each other, cut them, fill them up to fixed shapes; borders
loader.py    the data loader that is being read: refuse collators and datasets that lose the borders
trees.py     the batch of rows of trees
"""
