"""Prove isolation on the first batch of a training, before the first optimizer step."""

import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from accelerate import Accelerator, PartialState
from accelerate.utils import gather_object, reduce
from datasets.utils import tqdm
from torch import nn
from transformers import PreTrainedModel

from hf_packing.attention import Proof, ProveInTraining, inner_model, prove_on_batch
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.training.losses import documents_in

_ADVICE = (
    "Short documents did not show this when the model was patched. Change the module, or train the model on padded "
    "batches without hf_packing"
)


@dataclass
class FirstBatchProof:
    """Proves isolation on the first batch in training mode, and on the first batch in evaluation mode.

    A batch counts if any rank has several documents in it. The main process prints one line for each proof, and `print`
    shows what was proven so far.
    """

    proofs: dict[str, Proof] = field(default_factory=dict)
    """What was proven on the rank with the most documents, by mode: "training" or "evaluation"."""
    _model: "weakref.ref[PreTrainedModel] | None" = None

    def check(self, model: nn.Module, batch: Mapping[str, Any], mode: str) -> None:
        """Prove isolation on a batch, unless it is proven for this model and mode; all ranks call this together.

        Args:
            model: the model as it is trained, with the wrappers of accelerate.
            batch: a packed batch on the model's device.
            mode: "training" or "evaluation".

        Raises:
            ModelNotSupportedError: isolation is not proven on a rank; raised on all ranks.
        """
        inner = inner_model(model)
        if self._model is None or self._model() is not inner:
            self.proofs, self._model = {}, weakref.ref(inner)
        if mode in self.proofs or not reduce((documents_in(batch) > 1).int(), reduction="sum"):
            return
        proofs = gather_object([prove_on_batch(model, batch, training=mode == "training")])
        for rank, each in enumerate(proofs):
            if each.problem:
                on_rank = f" on rank {rank}" if len(proofs) > 1 else ""
                raise ModelNotSupportedError(
                    f"{type(inner).__name__}: the first batch{on_rank} shows that packed documents are not isolated: "
                    f"on {each.where}, {each.problem}. {_ADVICE}"
                )
        self.proofs[mode] = max(proofs, key=lambda each: each.documents)
        if PartialState().is_main_process:
            tqdm.write(self._line(mode))  # print() would break the progress bar

    def __str__(self) -> str:
        if not self.proofs:
            return "isolation: to be proven on the first batch"
        return "\n".join(map(self._line, self.proofs))

    def _line(self, mode: str) -> str:
        return f"isolation: proven on the first {mode} batch: {self.proofs[mode]}"


def isolation_in_summary(prove: ProveInTraining, proof: FirstBatchProof) -> FirstBatchProof | str:
    """Return an object whose text says in a summary what is proven of isolation, on the first batch or before."""
    if prove == "first batch":
        return proof
    return f"isolation: proven {'on a small copy of the model' if prove == 'small' else 'when the model was patched'}"


def prepared_model(accelerator: Accelerator, model: nn.Module) -> nn.Module:
    """Return a model as `accelerator.prepare` has returned it, or the model itself if it was not prepared."""
    inner = inner_model(model)
    prepared = (each for each in accelerator._models if _contains(each, inner))
    return next(prepared, model)


def _contains(prepared: nn.Module, model: PreTrainedModel) -> bool:
    with suppress(PackingError):  # a model that is not of transformers
        return inner_model(prepared) is model
    return False
