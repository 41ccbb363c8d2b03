"""Planning turns document lengths into a plan, which assigns documents to packs. Planning does not read tokens.

A piece is a slice of a document that fits in a pack. A pattern describes equal packs by the lengths of their pieces.
The modules, with the input and the output of each module:

    lengths.py         lengths -> LengthCounts             check and count lengths; cut long documents into pieces
    patterns.py        LengthCounts -> Cuts                cut documents into pieces, given only counts of lengths
    best_fit.py        counts of pieces -> Patterns        pack pieces by best-fit or first-fit decreasing
    table.py           Cuts and Patterns -> PatternTable   plan from counts alone; assign documents to packs
    permutation.py     seed -> orders                      shuffle documents of equal length, packs and their documents
    plan.py            arrays -> PackingPlan               check, edit, describe, save and load a plan
    windows.py         PackingPlan -> packs that wait      plan a stream window by window
    rank_layout.py     lengths -> RankLayout -> Exchange   put documents on several ranks; what these send each other
    length_schedule.py step -> length                      the largest length of a segment, which grows during training
    metrics.py         PackingPlan -> PackingMetrics       compute metrics, such as padding, and a lower bound

Each strategy (`hf_packing.strategies`) has its own algorithm for making patterns. Strategies that need the documents in
dataset order make the plan directly, without a PatternTable. Planning depends on NumPy and on no other library.

Example: the steps of `plan_packing(lengths, BestFit(8, seed=None))`, array by array:
    >>> from hf_packing.planning.lengths import check_lengths, count_lengths
    >>> from hf_packing.planning.best_fit import best_fit_patterns
    >>> from hf_packing.planning.table import PatternTable
    >>> from hf_packing.planning.patterns import cut_by_overflow

    Check the lengths of six documents. One document is empty, and one document is longer than a pack of 8 tokens:

    >>> lengths = check_lengths([5, 3, 11, 3, 0, 6])

    Count the documents of each length:

    >>> counts = count_lengths(lengths)
    >>> counts.length.tolist(), counts.documents.tolist()
    ([0, 3, 5, 6, 11], [1, 2, 1, 1, 1])

    Cut documents into pieces. A document of 11 tokens becomes two pieces: 8 tokens, which fill a pack, and 3 tokens:

    >>> cuts = cut_by_overflow(counts, 8, "split")
    >>> cuts.piece_offsets.tolist(), cuts.piece_length.tolist()
    ([0, 0, 1, 2, 3, 5], [3, 5, 6, 8, 3])
    >>> cuts.counts().tolist()  # number of pieces of 0, 1, 2, ... tokens
    [0, 0, 0, 3, 0, 1, 1, 0, 1]

    Pack the pieces. Each of the four patterns describes one pack. The last pattern has two segments of 3 tokens:

    >>> patterns = best_fit_patterns(cuts.counts(), 8)
    >>> patterns.packs.tolist(), patterns.entry_offsets.tolist()
    ([1, 1, 1, 1], [0, 1, 2, 4, 5])
    >>> patterns.entry_length.tolist(), patterns.entry_copies.tolist()
    ([8, 6, 5, 3, 3], [1, 1, 1, 1, 2])

    Combine the patterns and the cuts into a table. From the table and the document lengths, make the plan:

    >>> table = PatternTable(patterns=patterns, cuts=cuts, seed=None)
    >>> table
    PatternTable(6 documents, 6 segments, 4 packs, efficiency 0.8750)
    >>> plan = table.plan(lengths)
    >>> plan.pack_offsets.tolist()  # where the segments of each pack begin and end
    [0, 1, 2, 4, 6]
    >>> plan.segment_document.tolist(), plan.segment_start.tolist(), plan.segment_length.tolist()
    ([2, 5, 0, 1, 3, 2], [0, 0, 0, 0, 0, 8], [8, 6, 5, 3, 3, 3])
"""

from hf_packing.checks import refuse_older

refuse_older("numpy")
