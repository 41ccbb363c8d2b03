"""Pack documents that begin with the same tokens as trees, in which each shared prefix stands once.

segments.py  the segments of rows of trees, and where the tokens of each document stand
find.py      find the prefixes that documents share, and measure how much smaller that makes them
forest.py    the documents of trees in their order; cut trees that are larger than a pack
rows.py      plan a dataset, and build its rows of trees
"""
