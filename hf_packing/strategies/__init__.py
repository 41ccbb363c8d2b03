"""Packing strategies. A strategy decides which documents share a pack.

A counting strategy needs only the number of documents of each length. The other strategies need the length of each
document, in the order of the documents. The algorithm of a strategy is in the same file or folder as the strategy; only
best fit and first fit are in planning/best_fit.py.

    base.py         base classes of strategies, the strategy registry, plan_packing and plan_counts
    greedy.py       BestFit and ShortestPackFirst, which are counting strategies
    nnls.py         NonNegativeLeastSquares, a counting strategy that needs scipy
    optimal.py      Optimal, a counting strategy that needs scipy
    column_generation.py  the algorithm of Optimal; how solutions of an optimizer become packs
    bucket.py       Bucket, a counting strategy, and BucketByLength; both strategies make packs of several capacities
    sequential.py   FixedLength, FirstCome and Multipack
    compare.py      the function compare, which plans the same lengths with several strategies

A new strategy is a class with `@register_strategy` in a module of this package, a section in docs/guides/strategies.md,
and tests of the strategy's own behavior. The command line, the tests of all strategies and the error messages find the
class in the registry. CONTRIBUTING.md lists all steps for a new strategy.
"""
