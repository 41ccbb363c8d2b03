"""The strategy Optimal, which searches for the fewest packs by column generation.

A slot is a place for one document in a pack. The slot may be longer than the document.

strategy.py            the strategy Optimal, and an exact solver for few documents
slots.py               choice of slot lengths: all document lengths, or fewer lengths to which documents are rounded up
column_generation.py   solution with fractional numbers of packs, lower bound on packs, and rounding to whole packs
knapsack.py            pricing, a step of column generation: search for packs whose slots have the highest total value
"""
