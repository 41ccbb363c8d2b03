"""Pack documents that begin with the same tokens as trees, in which each shared prefix stands once.

find_trees.py   find the prefixes that documents share
sort_pieces.py  sort documents by their content, and count the tokens that neighbors have in common
token_keys.py   the values by which documents are compared: tokens, and everything that belongs to a token
plan_trees.py   plan a dataset with a strategy that can pack trees
tree_rows.py    build rows of trees according to a plan
tree_paths.py   where the tokens of each document stand in a row of trees
join_rows.py    join rows of trees into rows with several trees
restore.py      restore documents from rows of trees
measure.py      measure how much smaller documents would become
"""
