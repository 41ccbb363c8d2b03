"""Losses in chunks of tokens: small chunks for tiny models, and a count of the chunks."""

from contextlib import contextmanager
from unittest.mock import patch

from hf_packing.training import chunked_head, run_with_loss


@contextmanager
def chunks_summed():
    """Within the block, note the number of tokens of every sum over chunks, and the size of its chunks."""
    found, stock = [], chunked_head.sum_of_chunks

    def noting(loss_of_chunk, hidden, size, gate):
        found.append((hidden.shape[1], size))
        return stock(loss_of_chunk, hidden, size, gate)

    with patch.object(chunked_head, "sum_of_chunks", noting):
        yield found


@contextmanager
def chunks_of(tokens, model):
    """Within the block, compute the loss of a model for so many tokens at a time; yield what `chunks_summed` yields."""
    logits = tokens * model.config.get_text_config().vocab_size
    with patch.object(run_with_loss, "CHUNK_LOGITS", logits), chunks_summed() as found:
        yield found
