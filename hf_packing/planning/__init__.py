"""Planning: turn document lengths, and nothing else, into a plan of which documents go into which pack.

    lengths.py         lengths -> LengthCounts             check and count; cut what is longer than a pack
    patterns.py        LengthCounts -> Cuts                how documents are cut into pieces
    open_packs.py      counts of pieces -> Patterns        how pieces are packed, best-fit or first-fit
    pattern_table.py   Cuts and Patterns -> PatternTable   a plan from counts alone, for any number of workers
    assign.py          PatternTable -> PackingPlan         which document goes where
    permutation.py                                         ... at random, one element at a time
    plan.py            PackingPlan                         the plan, and the checks that it must pass
    storage.py                                             ... saved to disk
    metrics.py         PackingPlan -> PackingMetrics       padding, truncation and more; lower bounds

Strategies (`hf_packing.strategies`) differ in how they make the patterns. Some need the documents in order and make
the plan themselves. Everything here needs NumPy alone.

Example: what `plan_packing(lengths, BestFit(8, seed=None))` does, array by array:
    >>> from hf_packing.planning.lengths import check_lengths, count_lengths
    >>> from hf_packing.planning.open_packs import best_fit_patterns
    >>> from hf_packing.planning.pattern_table import PatternTable
    >>> from hf_packing.planning.patterns import cut_by_overflow

    Six documents, one of them empty and one longer than a pack of 8 tokens:

    >>> lengths = check_lengths([5, 3, 11, 3, 0, 6])

    How many documents there are of each length:

    >>> counts = count_lengths(lengths)
    >>> counts.length.tolist(), counts.documents.tolist()
    ([0, 3, 5, 6, 11], [1, 2, 1, 1, 1])

    Each length becomes pieces: none, one, or for 11 tokens a full pack of 8 and a remainder of 3:

    >>> cuts = cut_by_overflow(counts, 8, "split")
    >>> cuts.piece_offsets.tolist(), cuts.piece_length.tolist()
    ([0, 0, 1, 2, 3, 5], [3, 5, 6, 8, 3])
    >>> cuts.counts().tolist()  # pieces of 0, 1, 2, ... tokens
    [0, 0, 0, 3, 0, 1, 1, 0, 1]

    Packs as patterns: how many packs share each pattern, and which segment lengths it has:

    >>> patterns = best_fit_patterns(cuts.counts(), 8)
    >>> patterns.packs.tolist(), patterns.entry_offsets.tolist()
    ([1, 1, 1, 1], [0, 1, 2, 4, 5])
    >>> patterns.entry_length.tolist(), patterns.entry_copies.tolist()
    ([8, 6, 5, 3, 3], [1, 1, 1, 1, 2])

    Patterns and cuts make a table, which does not yet say which document goes where. With the lengths, it makes a plan:

    >>> table = PatternTable(patterns=patterns, cuts=cuts, seed=None)
    >>> table
    PatternTable(6 documents, 6 segments, 4 packs, efficiency 0.8750)
    >>> plan = table.plan(lengths)
    >>> plan.pack_offsets.tolist()  # where the segments of each pack begin and end
    [0, 1, 2, 4, 6]
    >>> plan.segment_document.tolist(), plan.segment_start.tolist(), plan.segment_length.tolist()
    ([2, 5, 0, 1, 3, 2], [0, 0, 0, 0, 0, 8], [8, 6, 5, 3, 3, 3])
"""
