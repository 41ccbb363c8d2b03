"""Strategies, which decide which documents share a pack. Each strategy is in the same file as the strategy's algorithm.

    base.py         base classes of strategies, the registry, plan_packing and plan_counts
    greedy.py       BestFit and ShortestPackFirst, which need only counts of lengths
    nnls.py         NonNegativeLeastSquares, which needs only counts of lengths, and scipy
    optimal/        Optimal, which needs only counts of lengths, and scipy
    fill_columns.py turns solutions of NonNegativeLeastSquares and Optimal into packs
    bucket.py       Bucket, which needs only counts of lengths, and BucketByLength, which needs documents in order; the
                    packs of both strategies have several capacities
    sequential.py   FixedLength, FirstCome and Multipack, which need documents in order
    compare.py      compare, which plans the same lengths with several strategies

A new strategy is a class with `@register_strategy` in a module of this package, a page in docs/strategies, and tests of
the strategy's own behavior. The command line, the tests of all strategies and the error messages find the class in the
registry. docs/ARCHITECTURE.md has all steps.
"""
