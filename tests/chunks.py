"""Losses in chunks of tokens: small chunks for tiny models, and a count of the chunks."""

from contextlib import contextmanager
from unittest.mock import patch

from hf_packing.training import logits as module


@contextmanager
def chunks_summed():
    """Within the block, note the number of tokens of every sum over chunks, and the size of its chunks."""
    found, stock = [], module.sum_of_chunks

    def noting(loss_of_chunk, hidden, size, gate):
        found.append((hidden.shape[1], size))
        return stock(loss_of_chunk, hidden, size, gate)

    with patch.object(module, "sum_of_chunks", noting):
        yield found


@contextmanager
def chunks_of(tokens, model):
    """Within the block, compute the loss of a model for so many tokens at a time; yield what `chunks_summed` yields."""
    size = tokens * model.config.get_text_config().vocab_size
    with patch.object(module, "CHUNK_LOGITS", size), chunks_summed() as found:
        yield found
