"""Real processes: every document once an epoch on every rank count, killed and resumed runs, exact gradients."""

from collections import Counter

import pytest
import torch
import transformers
from packaging.version import Version
from processes import epochs_seen, logged, losses, read, run, steps_of
from tiny_models import build
from training_process import documents

RESUMES_ON_CPUS = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="transformers 5.17 cannot load a checkpoint on two CPUs"
)

THROUGH = ["trainer", "sft", "loop"]
NUMBER = 45


def trained_documents(number=NUMBER):
    """Each with at least one label to train on."""
    rows = documents(number)
    return Counter(
        tuple(ids) for ids, labels in zip(rows["input_ids"], rows["labels"], strict=True) if set(labels[1:]) != {-100}
    )


@pytest.fixture(scope="module", params=THROUGH)
def uninterrupted(request, tmp_path_factory):
    """Three epochs on two ranks."""
    folder = tmp_path_factory.mktemp(request.param)
    run(folder, ranks=2, through=request.param, documents=NUMBER)
    return request.param, folder


def test_every_document_once_in_every_epoch_on_two_ranks(uninterrupted):
    _, folder = uninterrupted
    counts, orders = epochs_seen(folder, ranks=2)
    assert list(counts) == [0, 1, 2]
    assert all(count == trained_documents() for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3
    assert steps_of(folder, 0) == steps_of(folder, 1)
    assert losses(folder, 0).keys() == set(range(1, len(steps_of(folder, 0)) + 1))


def test_logs_are_about_all_ranks(uninterrupted):
    through, folder = uninterrupted
    if through == "loop":
        pytest.skip("a loop logs what it likes")
    for rank in range(2):
        of_first_epoch = list(logged(folder, rank).values())[: len(losses(folder)) // 3]
        assert sum(facts["documents_per_step"] for facts in of_first_epoch) == NUMBER
        assert sum(facts["tokens_per_step"] for facts in of_first_epoch) == sum(
            map(len, documents(NUMBER)["input_ids"])
        )
        assert all(0.5 < facts["token_utilization"] <= 1 for facts in of_first_epoch)
        assert min(facts["attention_utilization"] for facts in of_first_epoch) < 1


def test_packed_rows_once_in_every_epoch_on_two_ranks(tmp_path):
    run(tmp_path, ranks=2, through="sft", packed=48, documents=NUMBER, accumulation=2)
    counts, orders = epochs_seen(tmp_path, ranks=2)
    assert all(count == trained_documents() for count in counts.values())
    assert len({tuple(order) for order in orders.values()}) == 3


@RESUMES_ON_CPUS
def test_killed_in_the_first_and_in_the_last_epoch(uninterrupted, tmp_path):
    through, folder = uninterrupted
    expected = losses(folder)
    steps = len(expected) // 3
    settings = {"ranks": 2, "through": through, "documents": NUMBER, "save_steps": 1}
    run(tmp_path, fails=True, kill_at=2, **settings)
    assert max(losses(tmp_path)) == 2
    run(tmp_path, fails=True, kill_at=2 * steps + 2, resume=True, **settings)
    run(tmp_path, resume=True, **settings)
    assert losses(tmp_path) == expected
    seen, trained = read(folder, "seen", 1), read(tmp_path, "seen", 1)
    assert [line["documents"] for line in trained] == [line["documents"] for line in seen]


@RESUMES_ON_CPUS
@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_another_number_of_ranks_is_refused_in_the_middle_of_an_epoch(tmp_path, through):
    settings = {"through": through, "documents": NUMBER, "save_steps": 1, "epochs": 1}
    run(tmp_path, fails=True, kill_at=2, **settings)
    done = run(tmp_path, ranks=2, resume=True, fails=True, **settings)
    assert "world_size: expected 1, as when the checkpoint was saved, got 2" in done.stderr + done.stdout


def gradients_of_a_padded_batch(loss):
    """All documents in one padded batch, through the stock model and its logits alone."""
    model = build("Llama", torch.float64)
    rows = documents(NUMBER)
    width = max(map(len, rows["input_ids"]))
    ids, labels, mask = (torch.full((NUMBER, width), fill) for fill in (0, -100, 0))
    for row, (tokens, wanted) in enumerate(zip(rows["input_ids"], rows["labels"], strict=True)):
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = (
            torch.tensor(tokens),
            torch.tensor(wanted),
            1,
        )
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    labels = labels[:, 1:]
    each = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    trained = (labels != -100).sum(1)
    of_documents = (each.sum(1) / trained.clamp(min=1)).sum() / (trained > 0).sum()
    total = each.sum() / trained.sum() if loss == "token" else of_documents
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, total.item()


def test_the_gradient_of_sft_trainer_on_two_ranks(tmp_path):
    """Its fused head makes the loss in float32."""
    expected, _ = gradients_of_a_padded_batch("sequence")
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    settings = {"through": "sft", "loss": "sequence", "accumulation": 2, "optimizer": "sgd", "dtype": "float64"}
    run(tmp_path, 2, documents=NUMBER, max_tokens=300, match_documents_per_step=NUMBER, epochs=1, **settings)
    found = torch.load(tmp_path / "gradients.pt")
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-5 * largest


@pytest.mark.parametrize("through", ["trainer", "loop"])
@pytest.mark.parametrize("loss", ["token", "sequence"])
def test_the_gradient_does_not_depend_on_the_split(tmp_path, loss, through):
    expected, value = gradients_of_a_padded_batch(loss)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for ranks, accumulation, max_tokens in [(1, 1, 2000), (1, 4, 300), (2, 1, 600)]:
        folder = tmp_path / f"{ranks}-{accumulation}"
        run(
            folder,
            ranks,
            through=through,
            loss=loss,
            documents=NUMBER,
            accumulation=accumulation,
            max_tokens=max_tokens,
            match_documents_per_step=NUMBER,
            epochs=1,
            dtype="float64",
            optimizer="sgd",
        )
        assert len(read(folder, "seen", 0)) == accumulation
        found = torch.load(folder / "gradients.pt")
        assert found.keys() == expected.keys()
        differences = [float((found[name] - expected[name]).abs().max()) for name in expected]
        assert max(differences) <= 1e-12 * largest
        assert losses(folder)[1] == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("through", ["trainer", "loop"])
def test_evaluation_is_the_same_at_any_batch_size_and_on_any_number_of_ranks(tmp_path, through):
    found = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        settings = {"epochs": 1, "optimizer": "sgd", "dtype": "float64", "match_documents_per_step": 44}
        run(folder, ranks, through=through, documents=44, max_tokens=2000, eval_batch_sizes=[1, 2, 4], **settings)
        found += [line["loss"] for line in read(folder, "evaluated", 0)]
    assert len(found) == 6
    assert max(found) - min(found) <= 1e-9 * max(found)
