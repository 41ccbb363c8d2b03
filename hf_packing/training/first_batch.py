"""Prove isolation and the step on the first batch of a training, before the first optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from accelerate import PartialState
from accelerate.utils import gather_object, reduce
from datasets.utils import tqdm
from torch import nn

from hf_packing.attention import (
    Proof,
    check_patched,
    has_local_weights,
    inner_model,
    prove_on_batch,
    prove_on_part,
    prove_split_rows,
)
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.training.losses import COUNTS, Batch, documents_in, part_of_row
from hf_packing.training.ranks import on_all_ranks
from hf_packing.training.step import StepCase, StepReport, prove_step

_ISOLATION = "isolation: proven on "


@dataclass
class FirstBatchProof:
    """Proves isolation and the step on the first batch in training mode, and on the first batch in evaluation mode.

    A batch counts if any rank has several documents in it or, of rows on several ranks, any row. Before any of these
    rows runs, short random documents have to prove that the model takes them. The main process prints one line for each
    proof, and `print` shows what was proven so far.
    """

    proofs: dict[str, Proof | StepReport] = field(default_factory=dict)
    """What was proven on the rank with the most documents, by what it is, as "isolation: proven on the first training
    batch"."""

    def check(self, model: nn.Module, batch: Batch, mode: str) -> None:
        """Prove isolation on a batch, unless it is proven for this mode; all ranks call this together.

        Args:
            model: the model as it is trained, with the wrappers of accelerate.
            batch: a packed batch on the model's device.
            mode: "training" or "evaluation".

        Raises:
            ModelNotSupportedError: isolation is not proven on a rank; raised on all ranks.
            PackingError: the proof raised an error on another rank, of ranks that do not shard the model; or the batch
                has lost which part of a row it is.
        """
        prove, on = prove_on_batch, f"the first {mode} batch"
        if part := part_of_row(batch):
            ranks = part.layout.num_ranks
            if check_patched(model).facts.ranks_per_row != ranks:
                self._require(f"{ranks} ranks", model, partial(prove_split_rows, model, ranks))
            prove, on = prove_on_part, f"{on} on {ranks} ranks"
        if _ISOLATION + on in self.proofs:
            return
        whole = {name: values for name, values in batch.items() if name != COUNTS}  # of documents that begin in a part
        if reduce((documents_in(whole) > 1).int(), reduction="sum"):
            self._require(on, model, partial(prove, model, batch, training=mode == "training"))

    def _require(self, on: str, model: nn.Module, prove: Callable[[], Proof]) -> None:
        """Make a proof on all ranks, and note what it was proven on, or raise an error on all ranks."""
        inner = inner_model(model)
        # ranks that shard a model wait for each other within the proof, so that a rank that fails there has to end
        proofs = gather_object([on_all_ranks(lambda _: prove()) if has_local_weights(inner) else prove()])
        for rank, each in enumerate(proofs):
            if each.problem:
                on_rank = f" on rank {rank}" if len(proofs) > 1 else ""
                raise ModelNotSupportedError(
                    f"{type(inner).__name__}: the first batch{on_rank} shows that packed documents are not isolated: "
                    f"on {each.where}, {each.problem}. Short documents did not show this when the model was patched. "
                    "Change the module, or train the model on padded batches without hf_packing"
                )
        self._note(_ISOLATION + on, max(proofs, key=lambda each: each.documents))

    def check_step(self, mode: str, make: Callable[[], StepCase]) -> None:
        """Prove the step of a case, unless it is proven for this mode; all ranks call this together.

        Raises:
            PackingError: the packed step is not the step that is made unpacked; raised on all ranks.
        """
        on = f"on the first {mode} batch"
        if not {f"step: proven {on}", f"step: not compared {on}"}.isdisjoint(self.proofs):
            return
        reports = gather_object([prove_step(make(), mode == "training")])
        for rank, report in enumerate(reports):
            if report.problem:
                on_rank = f" on rank {rank}" if len(reports) > 1 else ""
                raise PackingError(f"trainer: expected the step that it makes without packing{on_rank}, got {report}")
        self._note(f"step: {'proven' if reports[0].compared else 'not compared'} {on}", reports[0])

    def _note(self, what: str, proof: Proof | StepReport) -> None:
        self.proofs[what] = proof
        if PartialState().is_main_process:
            tqdm.write(f"{what}: {proof}")  # print() would break the progress bar

    def __str__(self) -> str:
        lines = [f"{what}: {proof}" for what, proof in self.proofs.items()]
        return "\n".join(lines) or "isolation and the step: to be proven on the first batch"
