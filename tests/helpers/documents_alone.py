"""The scores of documents that run one by one through a model without a patch."""

import numpy as np
import torch


def alone(model, rows, labels=None):
    """Log-likelihood, number of scored tokens, whether they are greedy, and hidden states, by a loop over documents."""
    found = []
    for number, tokens in enumerate(rows):
        states = []
        handle = model.base_model.register_forward_hook(lambda _, __, output, to=states: to.append(output[0][0]))
        with torch.no_grad():
            logits = model(torch.tensor([tokens or [8]]), use_cache=False).logits[0].double().log_softmax(-1)
        handle.remove()
        scored = [n for n in range(1, len(tokens)) if labels is None or labels[number][n] != -100]
        likelihood = sum(float(logits[n - 1, tokens[n]]) for n in scored)
        greedy = all(int(logits[n - 1].argmax()) == tokens[n] for n in scored)
        found.append((likelihood, len(scored), greedy, states[0] if tokens else states[0][:0]))
    return found


def check(scores, expected, close=1e-6):
    assert np.allclose(scores.log_likelihood, [each[0] for each in expected], rtol=close, atol=0)
    assert scores.num_tokens.tolist() == [each[1] for each in expected]
    assert scores.greedy.tolist() == [each[2] for each in expected]
    assert scores.log_likelihood.dtype == np.float64
