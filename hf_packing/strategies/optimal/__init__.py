"""The strategy Optimal, which plans by column generation.

strategy.py            the strategy Optimal, and an exact solver for few documents
slots.py               the choice of slot lengths: all document lengths, or fewer lengths to round up to
column_generation.py   the fewest packs if fractions of packs are allowed, a lower bound, and rounding to whole packs
knapsack.py            pricing, a step of column generation: the most valuable packs for given values of the slots
"""
