"""Strategies: how documents become packs. Each class is in the same file as its algorithm.

    base.py         Strategy and its kinds, the registry, plan_packing and plan_counts
    greedy.py       BestFit, ShortestPackFirst              from counts of lengths alone
    nnls.py         NonNegativeLeastSquares                 ... with scipy
    optimal/        Optimal                                 ... with scipy
    fill_columns.py                                         ... turns solutions of these two into packs
    bucket.py       Bucket                                  ... with packs of several capacities;
                    BucketByLength                          from documents in order
    sequential.py   FixedLength, FirstCome, Multipack       from documents in order
    compare.py      compare: several strategies on the same lengths

A new strategy is a class with `@register_strategy` in a module of this package, a page in docs/strategies, and tests of
its own behavior. The command, the tests that cover all strategies and the error messages find it in the registry.
"""
