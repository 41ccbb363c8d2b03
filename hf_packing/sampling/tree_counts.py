"""Counts of documents that share prefixes, for the summary of a training."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TreeCounts:
    """Counts of the documents of a dataset whose rows are trees."""

    documents: int
    """Number of documents, or pieces of documents, in trees."""
    raw_tokens: int
    """Number of their tokens. Tokens that documents share are counted once for each document."""
    unique_tokens: int
    """Number of tokens in all trees. Tokens that documents share are counted once."""
    left_out: int = 0
    """Number of documents that are empty, or too long and dropped, so that they are in no tree."""
    lost_tokens: int = 0
    """Number of tokens in dropped documents and in the cut-off ends of truncated documents."""

    @property
    def shared_ratio(self) -> float:
        """The number of raw tokens for each token that stands in a row; 1 if nothing is shared."""
        return self.raw_tokens / max(self.unique_tokens, 1)

    def __str__(self) -> str:
        return (
            f"shared prefixes: {self.documents:,} documents of {self.raw_tokens:,} tokens are trees of "
            f"{self.unique_tokens:,} tokens, {self.shared_ratio:.2f} times fewer; the documents of a tree are in one "
            "optimizer step"
        )
