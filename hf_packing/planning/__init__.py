"""Planning: turn document lengths into a plan that assigns documents to packs. Planning reads no tokens.

    lengths.py         lengths -> LengthCounts             check and count lengths; cut long documents into pieces
    patterns.py        LengthCounts -> Cuts                cut counted documents into pieces
    open_packs.py      counts of pieces -> Patterns        pack counted pieces, best-fit or first-fit
    pattern_table.py   Cuts and Patterns -> PatternTable   plan from counts alone, for any number of workers
    assign.py          PatternTable -> PackingPlan         assign documents to packs
    permutation.py     seed -> permutation                 compute random orders, one element at a time
    plan.py            arrays -> PackingPlan               hold a plan, and check every new plan
    storage.py         PackingPlan -> files                save a plan to disk, and load a saved plan
    metrics.py         PackingPlan -> PackingMetrics       compute padding, truncation and more; lower bounds

Strategies (`hf_packing.strategies`) differ in how they make the patterns. Strategies that need the documents in order
make the plan directly, without a PatternTable. This package needs NumPy and no other dependency.

Example: the steps of `plan_packing(lengths, BestFit(8, seed=None))`, array by array:
    >>> from hf_packing.planning.lengths import check_lengths, count_lengths
    >>> from hf_packing.planning.open_packs import best_fit_patterns
    >>> from hf_packing.planning.pattern_table import PatternTable
    >>> from hf_packing.planning.patterns import cut_by_overflow

    Check the lengths of six documents. One document is empty, and one document is longer than a pack of 8 tokens:

    >>> lengths = check_lengths([5, 3, 11, 3, 0, 6])

    Count the documents of each length:

    >>> counts = count_lengths(lengths)
    >>> counts.length.tolist(), counts.documents.tolist()
    ([0, 3, 5, 6, 11], [1, 2, 1, 1, 1])

    Cut documents into pieces. A document of 11 tokens becomes two pieces, a full pack of 8 tokens and a remainder of 3:

    >>> cuts = cut_by_overflow(counts, 8, "split")
    >>> cuts.piece_offsets.tolist(), cuts.piece_length.tolist()
    ([0, 0, 1, 2, 3, 5], [3, 5, 6, 8, 3])
    >>> cuts.counts().tolist()  # number of pieces of 0, 1, 2, ... tokens
    [0, 0, 0, 3, 0, 1, 1, 0, 1]

    Pack the pieces. Each pattern stands for some equal packs, and lists the lengths of the segments in such a pack:

    >>> patterns = best_fit_patterns(cuts.counts(), 8)
    >>> patterns.packs.tolist(), patterns.entry_offsets.tolist()
    ([1, 1, 1, 1], [0, 1, 2, 4, 5])
    >>> patterns.entry_length.tolist(), patterns.entry_copies.tolist()
    ([8, 6, 5, 3, 3], [1, 1, 1, 1, 2])

    Combine patterns and cuts into a table. The table turns document lengths into a plan:

    >>> table = PatternTable(patterns=patterns, cuts=cuts, seed=None)
    >>> table
    PatternTable(6 documents, 6 segments, 4 packs, efficiency 0.8750)
    >>> plan = table.plan(lengths)
    >>> plan.pack_offsets.tolist()  # where the segments of each pack begin and end
    [0, 1, 2, 4, 6]
    >>> plan.segment_document.tolist(), plan.segment_start.tolist(), plan.segment_length.tolist()
    ([2, 5, 0, 1, 3, 2], [0, 0, 0, 0, 0, 8], [8, 6, 5, 3, 3, 3])
"""
