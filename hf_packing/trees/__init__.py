"""Pack documents that begin with the same tokens as trees, in which each shared prefix stands once.

segments.py  the segments of rows of trees, and where the tokens of each document stand
find.py      find the prefixes that documents share, and measure how much smaller that makes them
forest.py    cut trees that are larger than a pack, and plan trees with any strategy
rows.py      plan a dataset, and build its rows of trees
"""
