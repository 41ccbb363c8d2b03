"""The head in chunks on a CUDA device; skipped where there is none."""

import pytest
import torch
from patched_models import patched
from tiny_models import build

import hf_packing as hfp
from hf_packing.training import head as module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:attention runs segment by segment"),  # in float32
]


def batch_on_cuda(documents):
    batch = hfp.PackingCollator()([{"input_ids": ids} for ids in documents])
    return {name: value.cuda() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


@pytest.mark.parametrize("how", ["float32", "bfloat16", "autocast"])
def test_gradients_are_those_of_whole_logits(monkeypatch, how):
    """In bfloat16, they differ from those in float32 no more than those of whole logits do, and a little."""
    monkeypatch.setattr(module, "_warn_once", pytest.fail)  # no whole logits
    batch = batch_on_cuda([list(range(3, 60)), list(range(40, 90)), [5, 6, 7]])
    found = {}
    for case, tokens, rounded in (("exact", 1000, False), ("whole", 1000, True), ("chunks", 7, True)):
        model = patched().cuda()
        if rounded and how == "bfloat16":
            model.bfloat16()
        monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * model.config.vocab_size)
        with torch.autocast("cuda", torch.bfloat16, enabled=rounded and how == "autocast"):
            loss = hfp.compute_loss(model, batch)
        loss.backward()
        found[case] = [parameter.grad.float() for parameter in model.parameters()]
    for exact, whole, in_chunks in zip(*found.values(), strict=True):
        allowed = 2 * (whole - exact).norm() + 1e-2 * exact.norm()
        assert (in_chunks - exact).norm() <= allowed


def test_logits_of_a_whole_row_are_never_in_memory(monkeypatch):
    model = hfp.patch_model(build("Llama", torch.bfloat16, vocab_size=100_000).cuda())
    batch, peaks = batch_on_cuda([list(range(3, 203))] * 40), []
    for tokens in (10_000, 200):
        monkeypatch.setattr(module, "CHUNK_LOGITS", tokens * 100_000)
        for _ in range(2):  # the first call asks the model for its loss on a short document
            model.zero_grad()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            hfp.compute_loss(model, batch).backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 0.25 * peaks[0]
