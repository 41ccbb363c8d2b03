"""Losses in chunks of tokens: small chunks for tiny models, and a count of the chunks."""

from contextlib import contextmanager
from unittest.mock import patch

from hf_packing.training import head as module

WHOLE = None


@contextmanager
def chunks_summed():
    found, stock = [], module.sum_of_chunks

    def noting(loss_of_chunk, hidden, size):
        found.append((len(hidden), size))
        return stock(loss_of_chunk, hidden, size)

    with patch.object(module, "sum_of_chunks", noting):
        yield found


@contextmanager
def chunks_of(tokens, model):
    """Within the block, compute the loss of a model for so many tokens at a time; yield what `chunks_summed` yields.
    WHOLE computes all logits of a row at once, in the output layer itself."""
    if tokens is WHOLE:
        stock = module._reason_for_whole_rows
        how = patch.object(module, "_reason_for_whole_rows", lambda *args: ("a test asks for it", stock(*args)[1]))
    else:
        how = patch.object(module, "CHUNK_LOGITS", tokens * model.config.get_text_config().vocab_size)
    with how, chunks_summed() as found:
        yield found
