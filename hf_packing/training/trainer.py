"""The methods of a trainer after `attach`: it trains, evaluates and predicts on the batches of a source.

The trainer's class becomes a subclass of its own class and of PackedTrainer, WholeRowTrainer or UnpaddedTrainer.
`losses` has the rule by which losses are weighted.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer_utils import get_last_checkpoint

from hf_packing.attention import borders_required, inner_model, is_patched, temporarily
from hf_packing.batch.segments import with_segments_cut
from hf_packing.columns import LABELS
from hf_packing.errors import PackingError
from hf_packing.sampling.token_budget import longest_segment
from hf_packing.training.checks import check_averages_gradients
from hf_packing.training.kinds import labels_of
from hf_packing.training.losses import COUNTS, ITEMS, Batch, TokenMean
from hf_packing.training.model_loss import WholeStep
from hf_packing.training.ranks import data_rank, on_all_ranks
from hf_packing.training.resume import batches_resumed, save_batches
from hf_packing.training.state import TEST_DATASET, Attached, AttachedBatches, AttachedPacks, AttachedRows
from hf_packing.training.step_cases import BatchCase, RowsCase, TrainerCase, as_one_micro_batch, has_own_loss
from hf_packing.training.step_counts import Predictions, StepCounts, micro_batch_counts
from hf_packing.training.streams import StreamedRows
from hf_packing.upstream.trl import ROLLOUTS


class AttachedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer that trains on the batches that `attach` has planned."""

    attached: Attached

    def train(self, *args: Any, **kwargs: Any) -> Any:
        state, folder = self.attached, args[0] if args else kwargs.get("resume_from_checkpoint")
        on_all_ranks(lambda _: state.check(self))
        state.step_counts, state.first_step = StepCounts(), None
        if folder is True:
            folder = get_last_checkpoint(self.args.output_dir)
        with batches_resumed(self, folder):
            return super().train(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if _internal_call and output_dir is not None:  # a checkpoint
            save_batches(self, Path(output_dir))

    def hyperparameter_search(self, *_: Any, **__: Any) -> Any:
        raise PackingError(
            "hyperparameter_search: expected a trainer without attach, which has planned the batches of one training; "
            "search with a function that builds a trainer, attaches it and trains, as the objective of optuna"
        )

    def get_train_dataloader(self) -> Any:
        state = self.attached
        if not is_patched(inner_model(self.model)):  # a new model of model_init
            on_all_ranks(lambda _: state.settle(self))
        return state.loader_of(self, state.source)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device) -> Any:
        """Return this rank's micro-batches of a step, and the number of items in the step on all ranks: trainable
        tokens, documents, or what else the loss is a mean of."""
        state = self.attached
        state.check(self)  # a callback may have changed an argument
        if state.first_step is None:
            check_averages_gradients(self)
            state.first_step = self.state.global_step
        batches = list(islice(epoch_iterator, num_batches))
        if not batches:
            return batches, None
        return batches, state.step_counts.add(self.counts_of(batches, device), batches)

    def counts_of(self, batches: Sequence[Batch], device: torch.device) -> Tensor:
        """Return the counts of a step's micro-batches, float64 [ranks, micro-batches, counts]."""
        processes_per_rank = self.accelerator.num_processes // data_rank(self.accelerator).world_size
        counts = micro_batch_counts([self.cut_for_this_step(batch) for batch in batches], self.attached.loss)
        everywhere: Tensor = self.accelerator.gather(counts.to(device)[None])[::processes_per_rank]
        return everywhere

    def cut_for_this_step(self, batch: Batch) -> Batch:
        """Return a batch with the extra borders that the length_schedule of the batching asks for in this step."""
        return with_segments_cut(batch, longest_segment(self.attached.batching, self.state.global_step))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log packing metrics together with the training loss."""
        counts = self.attached.step_counts
        if "loss" in logs:
            logs = {**logs, **counts.take(self.attached.max_tokens)}
        if (name := "train_samples_per_second") in logs:
            # of documents: per_device_train_batch_size, of which Trainer knows, does not decide how large a step is
            logs[name] = round(int(counts.documents) / logs["train_runtime"], 3)
        super().log(logs, *args, **kwargs)


class PackedTrainer(AttachedTrainer):
    """A Trainer that trains, evaluates and predicts on packed batches."""

    attached: AttachedPacks
    gather_function: Any

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.attached.on_all_ranks(self):
            return super().evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self.attached.on_all_ranks(self):
            return super().predict(*args, **kwargs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        return self.attached.loader_in_order(self, "eval_dataset", dataset)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self.attached.loader_in_order(self, TEST_DATASET, test_dataset)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **named: Any,
    ) -> Any:
        """Let the trainer compute its own loss of a micro-batch, and weight it by its share of the optimizer step."""
        state, evaluation = self.attached, self.attached.evaluation
        trains = evaluation is None and num_items_in_batch is not None
        if (proof := state.first_batch_proof) is not None:
            proof.check(
                model,
                {**inputs, ITEMS: num_items_in_batch.long()} if trains else inputs,
                "training" if model.training else "evaluation",
                lambda mode: self.step_case(model, inputs, mode == "training"),
                0 if evaluation is None and not trains else self.state.global_step,
                partial(has_own_loss, self),
            )
        if trains:  # after isolation was proven on whole documents
            inputs = self.cut_for_this_step(inputs)
        loss = state.loss if trains or model.training else "token"
        step = WholeStep.of(model, inputs, loss)
        # SFTTrainer's own loss may have no logits to weight
        of_model = step.weighting is not None and state.sums_log_probs
        own = partial(Trainer.compute_loss, self) if of_model else super().compute_loss
        named |= {"return_outputs": True} if return_outputs else {}  # as Trainer passes it
        with as_one_micro_batch(self), step.observed(model) as head:
            head.is_read_later = True
            found = own(model, dict(step.inputs), num_items_in_batch=step.items, **named)
        mean, *outputs = found if isinstance(found, tuple) else (found,)
        share = step.share_of(num_items_in_batch if trains else None)
        if trains:  # DDP and FSDP take the mean of gradients over ranks
            share = share * data_rank(self.accelerator).world_size
        mean = mean * share
        if evaluation is not None:
            evaluation.add(mean, step.own)
        return (mean, *outputs) if outputs else mean

    def step_case(self, model: nn.Module, batch: Batch | None, training: bool = True) -> TrainerCase:
        """Return the case of a proof of the step."""
        if training and not isinstance(self.attached.source, StreamedRows):
            batch = None  # of which the rows are read again
        elif batch is None:
            batch = next(iter(self.get_train_dataloader()))
        return TrainerCase(self, model, batch, training)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with borders_required():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, model: nn.Module, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        """Give a batch labels, under the name of which Trainer computes a loss."""
        self.attached.predictions.begin(inputs)
        inputs = {**inputs, LABELS: labels_of(inputs).labels}
        with borders_required():
            return super().prediction_step(model, inputs, *args, **kwargs)

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        state, evaluation, predictions = self.attached, TokenMean(self.args.device), Predictions(self.accelerator)
        with (
            temporarily(state, evaluation=evaluation, predictions=predictions),
            temporarily(self, gather_function=partial(predictions.gathered, self.gather_function)),
            # a batch is one row of predictions, for which metrics get one loss
            temporarily(self.args, per_device_eval_batch_size=1),
        ):
            output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if (name := f"{metric_key_prefix}_loss") in output.metrics and evaluation.batches:
            summed, tokens = evaluation.over_ranks(self.accelerator)
            output.metrics[name] = summed / tokens if tokens else math.nan
        output.metrics.update({f"{metric_key_prefix}_{name}": number for name, number in state.lost.items()})
        return output._replace(num_samples=int(predictions.documents))


class WholeRowTrainer(AttachedTrainer):
    """A Trainer with its own collator, loss and evaluation, which trains on micro-batches of whole rows."""

    attached: AttachedRows

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
        **named: Any,
    ) -> Any:
        """Let the trainer compute its own loss of a micro-batch, and weight it by its share of the optimizer step."""
        proof = self.attached.first_batch_proof
        if proof is not None and num_items_in_batch is not None and model.training:
            proof.check_step("training", lambda: self.step_case(model), self.state.global_step)
        inputs = dict(inputs)
        counts = inputs.pop(COUNTS, None)
        with _gathering_uneven_tensors(self.accelerator):
            found = super().compute_loss(model, inputs, return_outputs, **named)
        if num_items_in_batch is None or (counts is None and not model.training):  # not a step of training
            return found
        if counts is None:
            raise PackingError(
                f"trainer: expected the batches of the collator in compute_loss, but {self.attached.kind.__name__} "
                f"makes others in training_step, without {COUNTS!r}. attach(trainer, None) keeps its batches"
            )
        self.current_gradient_accumulation_steps = 1  # training_step may divide by it, but the share is of a step
        loss, *outputs = found if isinstance(found, tuple) else (found,)
        units = counts[-1]
        share = units.to(loss.device).double() / num_items_in_batch * data_rank(self.accelerator).world_size
        loss = loss * share if units else torch.nan_to_num(loss * 0)  # the mean over no labels is not a number
        return (loss, *outputs) if outputs else loss

    def step_case(self, model: nn.Module, _: Batch | None = None) -> RowsCase:
        """Return the case of a proof of the step."""
        return RowsCase(self, model)


class UnpaddedTrainer(Trainer):  # type: ignore[misc]  # transformers has no types
    """A Trainer with its own batches, whose padding is not computed."""

    attached: AttachedBatches

    def _prepare_inputs(self, inputs: Any) -> Any:
        sampled, leveling = vars(self).get(ROLLOUTS), self.attached.leveling
        found = super()._prepare_inputs(inputs)
        batches = vars(self).get(ROLLOUTS)
        if leveling is None or batches is None or batches is sampled:
            return found
        place = next((number for number, each in enumerate(batches) if each is found), None)
        if place is None:
            raise PackingError(
                "level: expected _prepare_inputs to return a micro-batch of the rollouts, as TRL does, but that "
                f"of {self.attached.kind.__name__} returns another object; leave level out"
            )
        leveled = leveling.level(batches)
        setattr(self, ROLLOUTS, leveled)
        return leveled[place]

    def get_batch_samples(self, *args: Any, **named: Any) -> Any:
        check_averages_gradients(self)
        batches, items = super().get_batch_samples(*args, **named)
        leveling, loader = self.attached.leveling, self.accelerator.gradient_state
        # in an uneven last step, TRL's metrics, and KTO's loss with them, leave out the rows of the last ranks
        is_uneven = loader.end_of_dataloader and loader.remainder > 0
        if leveling is None or leveling.samples or is_uneven:
            return batches, items
        return leveling.level(batches), items

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if self.attached.leveling is not None and "loss" in logs:
            logs = {**logs, **self.attached.leveling.take()}
        super().log(logs, *args, **kwargs)

    def compute_loss(self, model: nn.Module, inputs: Batch, *args: Any, **named: Any) -> Any:
        if (proof := self.attached.first_batch_proof) is not None and model.training:
            make = partial(self.step_case, model, inputs, named.get(ITEMS))
            proof.check_step("training", make, self.state.global_step)
        return super().compute_loss(model, inputs, *args, **named)

    def step_case(self, model: nn.Module, inputs: Batch | None, items: Any = None) -> BatchCase:
        """Return the case of a proof of the step on a batch, as the trainer computes the loss of it."""
        if inputs is None:
            if hasattr(self, ROLLOUTS):
                raise PackingError("batch: expected a batch of rollouts for a trainer that samples, got None")
            inputs = next(iter(self.get_train_dataloader()))
        return BatchCase(self, model, inputs, items)


@contextmanager
def _gathering_uneven_tensors(accelerator: Accelerator) -> Iterator[None]:
    """Context manager: within the block, `accelerator.gather` and `gather_for_metrics` take tensors of any length.

    Trainers of TRL gather metrics of the rows of a batch. Under a token budget, ranks have different numbers of rows.
    """
    gather = accelerator.gather

    def gather_uneven(values: Any) -> Any:
        if accelerator.num_processes == 1 or not isinstance(values, Tensor) or not values.ndim:
            return gather(values)
        return torch.cat([each.to(values.device) for each in gather_object([values.detach().cpu()])])

    with temporarily(accelerator, gather=gather_uneven):
        yield
