"""Optimal, by column generation.

strategy.py            Optimal, and what it tries in which order
slots.py               which lengths the optimizer looks at: all, or fewer that others are rounded up to
column_generation.py   the fewest packs when fractions of packs are allowed, and a bound
knapsack.py            ... which asks for the most valuable packs
dive.py                whole packs from fractions
few_documents.py       the exact answer for a few documents
"""
