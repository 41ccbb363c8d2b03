"""Padded batches of texts with and without pictures: only the text backbone runs without the padding."""

import copy
from functools import cache

import peft
import pytest
import torch
from forms import check_gradients, gradients_of
from tiers import fast_only

import hf_packing as hfp
from hf_packing.attention.function import NAME
from hf_packing.attention.route import route_of
from tools.survey.picture_inputs import batch_of, make_documents
from tools.survey.picture_models import picture_model


@cache
def stock_and_patched(name):
    """Padded batches, too, are proven once."""
    stock = picture_model(name)
    text = stock.model.language_model
    text.layers, text.config.num_hidden_layers = text.layers[:2], 2
    return stock, hfp.patch_model(copy.deepcopy(stock), padded=True)


def documents_with_pictures(name):
    """A tiny model in float64, its patched copy, a padded batch with two pictures, and the places of the tokens."""
    stock, model = map(copy.deepcopy, stock_and_patched(name))
    return stock, model, *batch_of(stock, make_documents(stock), "left")


def alone(stock):
    """Logits of the stock model, which may have adapters, for each document by itself, and all gradients."""
    inner = stock.get_base_model() if isinstance(stock, peft.PeftModel) else stock
    batches = [batch_of(inner, [document], "right")[0] for document in make_documents(inner)]
    logits = [stock(**batch, use_cache=False).logits[0] for batch in batches]
    return logits, gradients_of(stock, [logits])


def check_places(model, logits, places, expected):
    found = gradients_of(model, [[logits[number, place] for number, place in enumerate(places)]])
    check_gradients(found, expected)


@pytest.mark.parametrize("name", fast_only(["qwen2_5_vl", "qwen3_vl"], "qwen3_vl"))
def test_rows_with_and_without_pictures(name):
    stock, model, *_ = documents_with_pictures(name)
    expected, gradients = alone(stock)
    assert any(name.startswith("model.visual") and bool(each.any()) for name, each in gradients.items())
    for side in ("right", "left"):
        batch, places = batch_of(stock, make_documents(stock), side)
        logits = model(**batch).logits
        for number, (place, one) in enumerate(zip(places, expected, strict=True)):
            assert torch.allclose(logits[number, place], one, atol=1e-12)
        check_places(model, logits, places, gradients)
    assert route_of(model).facts.proven["padded batch"].backbone == "model.language_model"


def test_masks_of_its_own_for_pictures_are_refused():
    """In Gemma 3, the tokens of a picture see each other."""
    stock, model, batch, _ = documents_with_pictures("gemma3")
    with pytest.raises(hfp.ModelNotSupportedError, match="padded batches with pictures or sound are not supported"):
        model(**batch)
    without = make_documents(stock)[1::2]
    batch, places = batch_of(stock, without, "left")
    logits = model(**batch).logits
    for number, (document, place) in enumerate(zip(without, places, strict=True)):
        one, _ = batch_of(stock, [document], "right")
        assert torch.allclose(logits[number, place], stock(**one, use_cache=False).logits[0], atol=1e-9)


def test_pictures_before_the_tokens_of_a_row_are_refused():
    """GIT lays a picture before the text, in the module that gets the tokens without padding."""
    model = picture_model("git")
    model.git.encoder.layer, model.config.num_hidden_layers = model.git.encoder.layer[:1], 1
    documents = make_documents(model)
    hfp.patch_model(model, padded=True)
    for some, more in ((documents, 0), (documents[:1], 0), (documents[:1], 4)):
        for side in ("right", "left"):
            batch, _ = batch_of(model, some, side, more)
            with pytest.raises(hfp.ModelNotSupportedError, match="pictures or sound are not .*it got pixel_values of"):
                model(**batch, use_cache=False)
    ids = batch["input_ids"]
    assert model(ids, attention_mask=batch["attention_mask"]).logits.shape[:2] == ids.shape


@pytest.mark.filterwarnings("ignore:.hidden_state. is deprecated:FutureWarning")  # inside Mllama of transformers 5.17
def test_attention_to_pictures_is_refused():
    """In Mllama, tokens see the 17 places of a picture, which may be as many as the tokens of the longest row."""
    model, ratio = hfp.patch_model(picture_model("mllama"), padded=True), torch.ones(2, 1, dtype=torch.long)
    ratios = {"aspect_ratio_ids": ratio, "aspect_ratio_mask": ratio[..., None]}
    for length in (9, 17):
        ids = torch.arange(2 * length).view(2, length) + 8
        mask = torch.ones_like(ids)
        mask[1, :3] = 0
        with pytest.raises(hfp.ModelNotSupportedError, match="it got cross_attention_states of shape"):
            model(ids, attention_mask=mask, **ratios, pixel_values=torch.randn(2, 1, 1, 3, 16, 16).double())
    assert model(ids, attention_mask=mask).logits.shape[:2] == ids.shape


CHECKPOINTED = ["llava", "qwen2_5_vl", "qwen3_vl", "internvl", "llava, frozen, with adapters"]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("use_reentrant", fast_only([True, False], True))
@pytest.mark.parametrize("name", fast_only(CHECKPOINTED, "llava"))
def test_checkpointed_towers(name, use_reentrant):
    """The backward pass runs the tower a second time, after the forward of the model has ended."""
    stock, model, batch, places = documents_with_pictures(name.partition(",")[0])
    if is_frozen := "frozen" in name:
        torch.manual_seed(0)
        stock = peft.get_peft_model(
            stock, peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        )
        stock.get_submodule("base_model.model.model.vision_tower").requires_grad_(False)
        model = hfp.patch_model(copy.deepcopy(stock), padded=True)
    _, expected = alone(stock.train())
    assert any("vis" in name and bool(each.any()) for name, each in expected.items()) != is_frozen
    model.train().gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    check_places(model, model(**batch).logits, places, expected)


def test_a_tower_alone():
    stock, model, batch, _ = documents_with_pictures("llava")
    pixels = batch["pixel_values"]
    for one, other in ((model, stock), (model.model.vision_tower, stock.model.vision_tower)):
        call = "get_image_features" if hasattr(one, "get_image_features") else "forward"
        found, expected = (getattr(each, call)(pixel_values=pixels) for each in (one, other))
        assert torch.equal(found.last_hidden_state, expected.last_hidden_state)
    attention = {each: each.config.text_config._attn_implementation for each in (stock, model)}
    assert attention == {stock: "sdpa", model: NAME}
    assert model.config.vision_config._attn_implementation == "sdpa"
    model.config.vision_config._attn_implementation = "eager"  # towers are the user's
    model(**batch)
    hfp.unpatch_model(model)
    assert model.config.vision_config._attn_implementation == "eager"
    assert model.config.text_config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["llava", "qwen2_5_vl"])
def test_pictures_without_padding(name):
    stock, model, *_ = documents_with_pictures(name)
    batch, _ = batch_of(stock, make_documents(stock)[2:3], "right")
    ones = batch.pop("attention_mask")
    positions = torch.arange(ones.shape[1])[None]
    for more in ({}, {"attention_mask": ones}, {"position_ids": positions}):
        with torch.no_grad():
            expected = stock(**batch, **more, use_cache=False).logits
            for own in ({}, {"attention_mask": ones}) if "position_ids" in more else ({},):
                assert torch.equal(model(**batch, **more, **own).logits, expected)
    rows = {key: torch.cat([each, each]) for key, each in batch.items()}
    with torch.no_grad():
        assert torch.allclose(model(**rows).logits[1], stock(**batch, use_cache=False).logits[0], atol=1e-12)
    if name == "qwen2_5_vl":
        rope, _ = stock.model.get_rope_index(
            batch["input_ids"], batch["mm_token_type_ids"], image_grid_thw=batch["image_grid_thw"]
        )
        with torch.no_grad():
            expected = stock(**batch, use_cache=False).logits
            assert torch.allclose(model(**batch, attention_mask=ones, position_ids=rope).logits, expected, atol=1e-12)


def test_packed_rows_with_pictures_are_refused():
    """Models count the positions of pictures themselves, and the proof has no pictures."""
    stock, model, *_ = documents_with_pictures("qwen2_5_vl")
    batch, _ = batch_of(stock, make_documents(stock)[:1], "right")
    ones = batch.pop("attention_mask")
    tokens = ones.shape[1]
    restarting = torch.cat([torch.arange(4), torch.arange(tokens - 4)])[None]
    borders = {"cu_seq_lens_q": torch.tensor([0, 4, tokens], dtype=torch.int32)}
    borders |= {"seq_idx": (restarting.cumsum(1) > 6).int()}
    for name, value in borders.items():
        for mask in ({}, {"attention_mask": ones}):
            with pytest.raises(hfp.PackingError, match=f"{name}: expected no borders .* beside pictures"):
                model(**batch, **mask, **{name: value})
    for positions in (restarting, restarting.expand(3, 1, -1), restarting.expand(4, 1, -1)):
        for mask in ({}, {"attention_mask": ones}):
            with pytest.raises(hfp.PackingError, match="position_ids: expected positions that rise by 1 .* pictures"):
                model(**batch, **mask, position_ids=positions)
