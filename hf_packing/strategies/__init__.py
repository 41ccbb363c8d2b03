"""Strategies: how documents become packs. A class stands with its algorithm.

    base.py         Strategy and its kinds, the registry, plan_packing and plan_counts
    greedy.py       BestFit, ShortestPackFirst              from counts of lengths alone
    nnls.py         NonNegativeLeastSquares                 ... with scipy
    optimal/        Optimal                                 ... with scipy
    columns.py                                              ... packs from what these two have solved
    bucket.py       Bucket                                  ... with packs of several capacities;
                    BucketByLength                          from documents in order
    sequential.py   FixedLength, FirstCome, Multipack       from documents in order
    compare.py      compare: several strategies on the same lengths

A new strategy is a class with `@register_strategy` in a module of this package, a page in docs/strategies, and tests of
what is special about it. The command, the tests of all strategies and the lists in errors find it in the registry.
"""
