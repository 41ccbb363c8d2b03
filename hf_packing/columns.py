"""Names of the columns in datasets and batches, and the label that losses ignore."""

INPUT_IDS = "input_ids"
LABELS = "labels"
ATTENTION_MASK = "attention_mask"
TOKEN_TYPE_IDS = "token_type_ids"

POSITION_IDS = "position_ids"
"""The position of each token in its segment, from 0."""
SEQ_LENGTHS = "seq_lengths"
"""The number of tokens of each segment, under TRL's name."""
BUCKET = "bucket"
"""The capacity of the pack, for strategies with several capacities."""
SEQ_IDX = "seq_idx"
"""The number of the segment that each token belongs to."""
CU_SEQ_LENS = ("cu_seq_lens_q", "cu_seq_lens_k")
"""Cumulative segment lengths from 0, as FlashAttention takes them for queries and keys."""
MAX_LENGTHS = ("max_length_q", "max_length_k")
"""The length of the longest segment, as FlashAttention takes it for queries and keys."""

SEGMENT_COLUMNS = (SEQ_LENGTHS, *CU_SEQ_LENS, SEQ_IDX, POSITION_IDS)
"""Columns that say where the segments of a row are; only packed rows have them."""

COMPLETION_MASK = "completion_mask"
ASSISTANT_MASKS = "assistant_masks"
LOSS_MASKS = (COMPLETION_MASK, ASSISTANT_MASKS)
"""TRL's masks of the tokens to train on. A token is trained on if every mask that is present has a 1 for it."""

IGNORED_LABEL = -100
"""The label that the losses of transformers ignore. The first token of every segment gets it: nothing precedes it."""
