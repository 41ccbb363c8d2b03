"""attach keeps rows with pictures whole: a budget of tokens and patches forms their batches, and SFTTrainer trains."""

import datasets
import numpy as np
import pytest
import torch
import trainers
import transformers
from PIL import Image
from training_by_hand import largest_difference
from transformers import Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer
from whole_rows import SIZES, after_a_step, arguments

import hf_packing as hfp
from hf_packing.training.whole_rows import patches_in

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

PICTURE = 128
ROWS = 40
TEMPLATE = """{% for message in messages %}{{ 'w3' if message['role'] == 'user' else 'w4' }}
{% if message['content'] is string %}{{ message['content'] }}
{% else %}{% for part in message['content'] %}{{ '<image>' if part['type'] == 'image' else part['text'] }}
{% endfor %}{% endif %} w2 {% endfor %}"""


@pytest.fixture(scope="module")
def processor():
    """Pictures of 16 x 16 pixels have 16 patches, and 17 tokens."""
    tokenizer = trainers.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    return transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        chat_template=TEMPLATE,
        num_additional_image_tokens=1,
    )


def llava():
    torch.manual_seed(0)
    sizes = SIZES | {"num_hidden_layers": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=4),
        text_config=transformers.LlamaConfig(vocab_size=PICTURE + 1, pad_token_id=0, **sizes),
        image_token_index=PICTURE,
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
    )
    return transformers.LlavaForConditionalGeneration(config).double()


@pytest.fixture(scope="module")
def chats():
    rng = np.random.default_rng(0)

    def said(by, most):
        return {"role": by, "content": " ".join(f"w{n}" for n in rng.integers(10, 128, rng.integers(1, most)))}

    def picture():
        return Image.fromarray(rng.integers(0, 255, (20, 16, 3), dtype=np.uint8))

    rows = [
        {
            "images": [picture() for _ in range(rng.integers(0, 3))],
            "messages": [said("user", 20), said("assistant", 30)],
        }
        for _ in range(ROWS)
    ]
    text = datasets.Value("string")
    messages = datasets.List({"role": text, "content": text})
    features = datasets.Features({"images": datasets.List(datasets.Image()), "messages": messages})
    return datasets.Dataset.from_list(rows, features=features)


def sft(folder, processor, chats, **changes):
    config = arguments(folder, SFTConfig, max_length=None, **changes)
    return SFTTrainer(llava(), config, train_dataset=chats, processing_class=processor)


def test_texts_that_the_collator_may_cut_are_refused(processor, chats, tmp_path):
    trainer = sft(tmp_path, processor, chats)
    trainer.args.max_length = 1024
    with pytest.raises(hfp.PackingError, match="max_length: expected None with pictures, got 1024"):
        hfp.attach(trainer, hfp.TokenBudget(200))


class Recorded:
    def __init__(self, collate):
        self.collate, self.batches = collate, []

    def __call__(self, rows):
        batch = self.collate(rows)
        self.batches.append({name: value.clone() for name, value in batch.items()})
        return batch


@pytest.mark.usefixtures("exact_log_probs")
def test_sft_with_pictures(processor, chats, tmp_path):
    accumulation = 3
    ours = sft(tmp_path, processor, chats, gradient_accumulation_steps=accumulation, max_steps=2)
    ours.data_collator = Recorded(ours.data_collator)
    summary = hfp.attach(ours, hfp.TokenBudget(200, max_patches=48))
    assert summary.documents == ROWS
    assert ours.attached.loss == "labeled tokens but the first"
    ours.data_collator.batches.clear()
    ours.train()
    batches = ours.data_collator.batches[: 2 * accumulation]
    assert any(patches_in(batch, 16) == 48 for batch in batches)
    assert all(patches_in(batch, 16) <= 48 for batch in batches)
    assert all(int(batch["attention_mask"].sum()) <= 200 for batch in batches)
    assert any((batch["attention_mask"] == 0).any() for batch in batches)

    stock = llava()
    for first in range(0, 2 * accumulation, accumulation):
        step, loss = batches[first : first + accumulation], 0
        labels = [batch.pop("labels")[:, 1:] for batch in step]
        for batch, of_batch in zip(step, labels, strict=True):
            logits = stock(**batch).logits[:, :-1].flatten(0, 1)
            summed = torch.nn.functional.cross_entropy(logits, of_batch.flatten(), reduction="sum")
            loss += summed / sum(int((each != -100).sum()) for each in labels)
        after_a_step(stock, loss)
    expected, before = stock.state_dict(), llava().state_dict()
    assert largest_difference(ours.model.state_dict(), expected) < 1e-12
    moved = {name for name in expected if not torch.equal(expected[name], before[name])}
    assert any("vision" in name for name in moved)
    assert any("language" in name for name in moved)


def test_rows_of_a_plain_trainer(tmp_path):
    """pixel_values in the dataset, one row in ten without a picture, and a collator by hand."""
    rng = np.random.default_rng(1)
    rows = []
    for number in range(30):
        pictures = 0 if number % 10 == 0 else int(rng.integers(1, 3))
        words = rng.integers(10, 128, rng.integers(2, 30)).tolist()
        pixels = rng.standard_normal((pictures, 3, 16, 16)).tolist()
        rows.append({"input_ids": [PICTURE] * 17 * pictures + words, "pixel_values": pixels})

    def collate(rows):
        tokens = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
        batch = {"input_ids": padded, "attention_mask": (padded != 0).long()}
        batch["labels"] = padded.masked_fill((padded == 0) | (padded == PICTURE), -100)
        pixels = [torch.tensor(row["pixel_values"]) for row in rows if row["pixel_values"]]
        return batch | ({"pixel_values": torch.cat(pixels)} if pixels else {})

    config = arguments(tmp_path, TrainingArguments, remove_unused_columns=False)
    trainer = Trainer(llava(), config, train_dataset=datasets.Dataset.from_list(rows), data_collator=collate)
    summary = hfp.attach(trainer, hfp.TokenBudget(120, max_patches=64))
    assert summary.documents == 30
    plan = trainer.get_train_dataloader().batch_sampler.plan
    patches = np.array([len(row["pixel_values"]) * 16 for row in rows])
    assert plan.per_micro_batch(patches).max() == 64
    trainer.train()
    assert trainer.state.global_step == 3


@pytest.mark.parametrize(
    ("shape", "patches"),
    [((12, 96), 12), ((3, 10, 96), 30), ((2, 3, 16, 16), 32), ((2, 5, 3, 16, 8), 80), ((0, 96), 0)],
)
def test_patches_of_pictures_in_any_layout(shape, patches):
    assert patches_in({"pixel_values": torch.zeros(shape), "input_ids": torch.ones(1, 4)}, 16) == patches
    assert patches_in({"pixel_values_videos": torch.zeros(shape)}, 16) == patches
