"""Which architectures of the installed transformers keep packed documents apart, stock and patched.

tiny.py     a tiny random model of any architecture
measure.py  one architecture: stock, patched, and compared with its documents alone
table.py    what was measured, as a page for people
"""
