"""Prove isolation and the step on the first batch of a training, before the first optimizer step."""

from collections.abc import Callable
from contextlib import nullcontext
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
    proves_rows_on,
)
from hf_packing.errors import ModelNotSupportedError, PackingError
from hf_packing.training.kinds import labels_of
from hf_packing.training.losses import Batch
from hf_packing.training.ranks import on_all_ranks
from hf_packing.training.step import StepCase, StepReport, is_due_again, on_any_rank, prove_step


@dataclass
class FirstBatchProof:
    """Proves isolation and the step on the first batch in training mode, and on the first batch in evaluation mode.

    Isolation is proven on the first batch in which any rank has several documents or, of rows on several ranks, any
    row. The main process prints one line for each proof, and `print` shows what was proven so far.
    """

    proofs: dict[str, Proof | StepReport] = field(default_factory=dict)
    """What was proven on the rank with the most documents, by what it is, as "isolation: proven on the first training
    batch"."""
    latest_step: dict[str, int] = field(default_factory=dict)
    """For each mode, the number of optimizer steps before the latest proof of a step, or before it was found that none
    is needed again."""

    def check(
        self,
        model: nn.Module,
        batch: Batch,
        mode: str,
        make: Callable[[str], StepCase],
        step: int,
        is_own: Callable[[], bool],
    ) -> None:
        """Prove isolation and the step on a batch, unless they are proven for this mode; all ranks call this together.

        The step of rows on several ranks is one of training, also in evaluation.

        Args:
            model: the model as it is trained, with the wrappers of accelerate.
            batch: a packed batch on the model's device.
            mode: "training" or "evaluation".
            make: makes the case of a proof of the step in a mode.
            step, is_own: as in `check_step`.

        Raises:
            ModelNotSupportedError: isolation is not proven on a rank; raised on all ranks.
            PackingError: the packed step is not the step that is made unpacked, raised on all ranks; or the batch has
                lost which part of a row it is.
        """
        ranks = labels_of(batch).ranks
        check_patched(model)
        with proves_rows_on(model, ranks) if ranks > 1 else nullcontext():
            self._check_isolation(model, batch, mode)
            of_step = "training" if ranks > 1 else mode
            self.check_step(of_step, partial(make, of_step), step, is_own)

    def _check_isolation(self, model: nn.Module, batch: Batch, mode: str) -> None:
        """Prove isolation on a batch, if a rank has several documents in it, or raise an error on all ranks."""
        labels, inner = labels_of(batch), inner_model(model)
        what = f"isolation: proven on the first {mode} batch{f' on {labels.ranks} ranks' if labels.ranks > 1 else ''}"
        if what in self.proofs or not reduce((labels.num_documents() > 1).int(), reduction="sum"):
            return

        def prove(_: object = None) -> Proof:
            return prove_on_batch(model, batch, training=mode == "training")

        # ranks that shard a model wait for each other within the proof, so that a rank that fails there has to end
        proofs = gather_object([on_all_ranks(prove) if has_local_weights(inner) else prove()])
        for rank, each in enumerate(proofs):
            if each.problem:
                on_rank = f" on rank {rank}" if len(proofs) > 1 else ""
                raise ModelNotSupportedError(
                    f"{type(inner).__name__}: the first batch{on_rank} shows that packed documents are not isolated: "
                    f"on {each.where}, {each.problem}. Short documents did not show this when the model was patched. "
                    "Change the module, or what a hook adds to it, such as the noise of neftune_noise_alpha; or train "
                    "the model on padded batches without hf_packing"
                )
        self._note(what, max(proofs, key=lambda each: each.documents))

    def check_step(
        self, mode: str, make: Callable[[], StepCase], step: int, is_own: Callable[[], bool] = lambda: True
    ) -> None:
        """Prove the step of a case, unless it is proven for this mode; all ranks call this together.

        Where the user's own code has a part in it, and of rows that stay whole, it is proven again; see `is_due_again`.

        Args:
            mode: "training" or "evaluation".
            make: makes the case.
            step: the number of optimizer steps so far; 0 to prove the step only once.
            is_own: returns whether the user's own code has a part in it.

        Raises:
            PackingError: the packed step is not the step that is made unpacked; raised on all ranks.
        """
        on = f"on the first {mode} batch"
        is_proven = f"step: proven {on}" in self.proofs
        if f"step: not compared {on}" in self.proofs or (is_proven and not is_due_again(step, self.latest_step[mode])):
            return
        self.latest_step[mode] = step
        if is_proven and not on_any_rank(is_own()):
            return
        reports = gather_object([prove_step(make(), mode == "training")])
        for rank, report in enumerate(reports):
            if report.problem:
                on_rank = f" on rank {rank}" if len(reports) > 1 else ""
                raise PackingError(f"trainer: expected the step that it makes without packing{on_rank}, got {report}")
        if not is_proven:
            self._note(f"step: {'proven' if reports[0].compared else 'not compared'} {on}", reports[0])

    def _note(self, what: str, proof: Proof | StepReport) -> None:
        self.proofs[what] = proof
        if PartialState().is_main_process:
            tqdm.write(f"{what}: {proof}")  # print() would break the progress bar

    def __str__(self) -> str:
        lines = [f"{what}: {proof}" for what, proof in self.proofs.items()]
        return "\n".join(lines) or "isolation and the step: to be proven on the first batch"
