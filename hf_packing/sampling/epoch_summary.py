"""EpochSummary, the counts of an epoch over all ranks, as `attach` returns and `print` shows them."""

from dataclasses import dataclass, field

from hf_packing.planning.length_schedule import LengthSchedule
from hf_packing.rows.changes import LabelCounts
from hf_packing.sampling.tree_counts import TreeCounts


@dataclass(frozen=True)
class EpochSummary:
    """Counts of one epoch over all ranks, which `print` shows as text."""

    optimizer_steps: int
    num_micro_batches: int
    """Number of micro-batches of each rank."""
    world_size: int
    documents: int
    """Number of documents; every segment of a packed row and every piece of a split document counts as a document."""
    tokens: int
    """Number of tokens in all rows; in rows of trees, shared tokens are counted once."""
    documents_per_step: float
    """Mean number of documents in an optimizer step."""
    tokens_per_step: float
    """Mean number of tokens in an optimizer step."""
    largest_micro_batch: int
    """Number of tokens in the largest micro-batch."""
    token_utilization: float
    """Mean number of tokens over ranks / maximum over ranks, averaged over micro-batches; 1 if no rank waits."""
    attention_utilization: float
    """The same ratio as token_utilization, but of attention cost, which is the sum of squared segment lengths."""
    copies: int
    """Number of copies of rows with masked labels, which are added if rows are too few for all micro-batches."""
    left_out: int
    """Number of rows that are empty, or too long and dropped."""
    lost_tokens: int
    """Number of tokens in dropped rows and in the cut-off ends of truncated documents."""
    labels: LabelCounts | None = None
    """Number of labels other than -100 that are left, and of those in the dataset; the first token of a document has no
    label if the model predicts the next token. None if not known, as where a collator draws the labels."""
    unpacked_documents_per_step: int | None = None
    """Number of documents in an optimizer step without packing; None if match_documents_per_step is set already, or
    cannot be set to this number."""
    split: int = 0
    """Number of documents that are split into pieces, since they are longer than a micro-batch may be."""
    packed_rows: int | None = None
    """Number of packed rows that hold the documents; None if documents are packed while training, or are in trees."""
    trees: TreeCounts | None = None
    """Counts of the documents that share prefixes; None if rows are not trees."""
    length_schedule: LengthSchedule | None = None
    """The schedule that cuts documents in training; the counts above are without its borders."""
    isolation: object = field(default=None, compare=False, repr=False)
    """An object whose text says what was proven about isolation so far; None if this is not known."""

    def __str__(self) -> str:
        lines = [
            f"{self.optimizer_steps:,} optimizer steps per epoch, each with {self.documents_per_step:,.1f} documents, "
            f"{self.tokens_per_step:,.0f} tokens on average",
            f"{self.world_size} x {self.num_micro_batches:,} micro-batches (ranks x micro-batches per rank), the "
            f"largest with {self.largest_micro_batch:,} tokens",
        ]
        if self.world_size > 1:
            lines.append(
                f"utilization of the ranks: {self.token_utilization:.1%} by tokens, {self.attention_utilization:.1%} "
                "by attention"
            )
        lines.append(
            f"{self.copies:,} masked copies, {self.left_out:,} rows left out, {self.lost_tokens:,} tokens lost"
            f"{'' if self.labels is None else f'; {self.labels}'}"
        )
        if self.unpacked_documents_per_step is not None:
            lines.append(
                f"without packing: {self.unpacked_documents_per_step:,} documents per optimizer step "
                f"({-(-self.documents // self.unpacked_documents_per_step):,} steps); "
                f"match_documents_per_step={self.unpacked_documents_per_step} keeps that schedule"
            )
        if self.trees is None:
            rows = ", packed while training" if self.packed_rows is None else f" in {self.packed_rows:,} packed rows"
            split = f"; {self.split:,} longer ones are split, and each piece counts" if self.split else ""
            lines.insert(0, f"{self.documents:,} documents{rows}{split}")
        else:
            lines.append(str(self.trees))
        if self.length_schedule is not None:
            lines.append(f"length of segments: {self.length_schedule}")
        return "\n".join(lines if self.isolation is None else [*lines, str(self.isolation)])
