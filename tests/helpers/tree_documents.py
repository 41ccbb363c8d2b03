"""Documents that share prefixes, end inside others and repeat, with labels that differ between relatives."""

PROMPT = [11, 5, 9, 30, 31]
DOCUMENTS = [
    [*PROMPT, 7, 8, 21, 3],
    [*PROMPT, 7, 8, 40, 41, 42],
    PROMPT,  # ends inside the others
    [*PROMPT, 7, 8, 21, 3],  # a duplicate, with other labels
    [*PROMPT, 60],
    [50, 51, 52],  # a tree of its own
    [50, 51, 53],  # without labels
    [77],
]
LABELS = [
    [-100] * 5 + [7, 8, 21, 3],
    [-100, 5, 9, 30, -100, 7, -100, 40, 41, 42],
    [-100, -100, 9, 30, 31],
    [-100] * 7 + [21, -100],
    [11, 5, 9, 30, 31, 60],
    [50, 51, 52],
    [-100] * 3,
    [77],
]
OTHER = [[[1, 2, 3, 4], [1, 2, 5]], [[-100, 2, 3, 4], [-100, -100, 5]]]
