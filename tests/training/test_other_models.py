"""A trainer's other models, such as a teacher, read the packed batches of the model that is trained."""

import copy
from itertools import pairwise

import pytest
import torch
from tiny_models import build
from torch.nn.functional import kl_div
from trainers import trainer_of
from training_process import documents
from transformers import CLIPVisionConfig, CLIPVisionModel, Trainer, TrainerCallback

import hf_packing as hfp
from hf_packing.attention import is_patched
from hf_packing.training.unpad_models import models_of


def divergence(student, teacher):
    """The sum over tokens of the divergence of two models' predictions."""
    return kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="sum")


class Distilling(Trainer):
    """Learns from a teacher alone, which gets the columns `given` of a batch; None for all of them."""

    given = None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = {name: value for name, value in inputs.items() if name != "labels"}
        with torch.no_grad():
            teacher = self.the_teacher(**{name: inputs[name] for name in self.given or inputs}).logits
        outputs = model(**inputs)
        loss = divergence(outputs.logits, teacher) / (1 if num_items_in_batch is None else num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


def models():
    """A student and a teacher with other weights and fewer layers."""
    teacher = build("Llama", torch.float64, num_hidden_layers=1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.mul_(0.7)
    return build("Llama", torch.float64), teacher.eval()


def distilling(folder, student, teacher, **changes):
    trainer = trainer_of(folder, Distilling, student, documents(6), **changes)
    trainer.the_teacher = teacher
    return trainer


def test_a_teacher_reads_each_document_alone(tmp_path):
    student, teacher = models()
    alone = copy.deepcopy(student), copy.deepcopy(teacher)
    trainer = distilling(tmp_path, student, teacher)
    hfp.attach(trainer, hfp.TokenBudget(256))
    batch = next(iter(trainer.get_train_dataloader()))
    borders = batch["cu_seq_lens_q"].tolist()
    assert len(borders) == 7  # all six documents
    with torch.no_grad():
        found = trainer.compute_loss(student, batch, num_items_in_batch=torch.tensor(1))
        rows = [batch["input_ids"][:, begin:end] for begin, end in pairwise(borders)]
        expected = sum(divergence(*(model(row).logits for model in alone)) for row in rows)
        as_one_document = divergence(*(model(batch["input_ids"]).logits for model in alone))
    assert float(expected) > 1
    assert float(found) == pytest.approx(float(expected), rel=1e-10)
    assert abs(float(as_one_document - expected)) > 1e-3 * float(expected)  # a leak would be seen


@pytest.mark.parametrize("given", [["input_ids"], ["input_ids", "position_ids"]])
def test_a_teacher_that_gets_no_borders_is_refused(tmp_path, given):
    trainer = distilling(tmp_path, *models())
    trainer.given = given
    hfp.attach(trainer, hfp.TokenBudget(256))
    trainer.args.per_device_eval_batch_size = 4
    if "position_ids" in given:
        trainer.train()
        assert trainer.evaluate(documents(6))["eval_loss"] > 0
        return
    for run in (trainer.train, lambda: trainer.evaluate(documents(6))):
        with pytest.raises(hfp.PackingError, match="position_ids: .* pass them to all models that get the batch"):
            run()


def test_all_models_of_a_trainer_are_found(tmp_path):
    student, teacher = models()
    trainer = distilling(tmp_path, student, teacher)
    trainer.teachers = [teacher, build("GPT2"), "a name"]
    trainer.by_task = {"chat": build("GPT2")}
    trainer.part, trainer.whole = student.model, torch.nn.ModuleList([student])
    trainer.loss_fn, trainer.projection = torch.nn.CrossEntropyLoss(), torch.nn.Linear(64, 64)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    trainer.tower = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=16))

    class Averaging(TrainerCallback):
        def __init__(self, average):
            self.average = average

    trainer.add_callback(Averaging(copy.deepcopy(student)))
    names = ["model", "the_teacher", "teachers[1]", "by_task['chat']", "Averaging.average"]
    assert list(models_of(trainer)) == names
    hfp.attach(trainer, hfp.TokenBudget(64))
    assert all(is_patched(model) for model in models_of(trainer).values())


def test_a_model_that_is_not_of_transformers_is_refused_by_name(tmp_path):
    student, teacher = models()
    trainer = distilling(tmp_path, student, teacher)
    trainer.judge = torch.nn.Sequential(torch.nn.Embedding(128, 4), torch.nn.GRU(4, 4))
    with pytest.raises(hfp.PackingError, match=r"trainer\.judge: .*expected a transformers PreTrainedModel.* outside"):
        hfp.attach(trainer, hfp.TokenBudget(64))
    assert not is_patched(student)
    assert not is_patched(teacher)
