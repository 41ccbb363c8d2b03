"""Optimal, by column generation.

strategy.py            Optimal, and what it tries in which order; the exact answer for a few documents
slots.py               which lengths the optimizer looks at: all, or fewer that others are rounded up to
column_generation.py   the fewest packs when fractions of packs are allowed, and a bound; whole packs from them
knapsack.py            ... pricing: finds the most valuable packs
"""
