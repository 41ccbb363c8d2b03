"""Keep packed documents apart inside a model, and verify by running the model that no document affects another one.

The rest of the package imports only from this file, never from the other files in this folder. The list below explains
the thirteen ideas behind the code. The names in parentheses are the files that implement the idea.

1. A packed row is a sequence of tokens that contains several segments. A segment is a document, or a part of a document
   that was cut, and a border is the boundary between two segments. A patched model reads the borders from its inputs
   (kinds/packed), and its modules can look up the borders while the model's forward runs (layout).
2. Attention is computed within each segment. The attention function `packed_varlen` is registered with transformers,
   and calls a CUDA kernel or exact attention in plain torch (function, exact). A table contains the kernels; a call
   runs on the first kernel that takes it and has failed in no proof (kernels, flex).
3. A module is segment-local if its output for a whole row equals its concatenated outputs for the row's segments. A
   module that is not segment-local, such as a convolution or a recurrent layer, runs segment by segment: its inputs are
   cut along their token axes, whose size is the number of tokens, and its outputs are concatenated (by_segment,
   token_axes). A sharded model in which processes would then wait for each other is refused.
4. A search finds the modules that are not segment-local. The search watches one forward of the model, and compares
   every module's output for the whole row with the module's outputs for the segments (search).
5. A route is a way to isolate documents in one model: an attention function, a format for the model's inputs, and a
   list of modules that run segment by segment (route). Some models get several rows laid end to end.
6. A patch installs a route in a model, and replaces the model's forward with a forward that reads the packed row
   (forward). Checkpointed layers run again in the backward pass, on the same layout. torch.compile
   compiles this forward once for batches of fixed shapes, and a few times for batches of any shape.
7. A case runs a model on a batch of documents, and on each document alone: a few random documents, or a training batch.
   It runs the model without dropout, and restores it (cases, runs, snapshot).
8. The proof of a case shows that replacing documents does not change the results of other documents, and that every
   document has the same outputs and gradients in the batch as when it is run alone (proof). Two results count as equal
   if rounding can explain their difference (tolerance). `check_isolation` runs a case without documents alone, in any
   model, patched or not, and reports what it has seen (report).
9. A training batch is proven before the first step, at the lengths, in the dtype and on the weights that the model
   trains with. If the proof fails, other runs find the module in which the difference begins (batch_proof).
10. `patch_model` installs the fastest route that passes the proof, or raises an error with the reason (patch). For a
    model whose weights are not in memory, the proof can run on a small copy of the model (small_copy).
11. Besides packed rows, there are other kinds of batches, each with a file of its own (kinds): padded batches, whose
    backbone gets the tokens without the padding; rows of trees, in which documents share their prefixes; and rows on
    several ranks, which exchange what their tokens attend to. A kind recognises its batches, says in its layout which
    keys tokens see and how modules get whole documents, and is proven before the first such batch. The forward asks
    the kinds in order; attention and modules by segment ask the layout.
12. Some models, such as masked language models, see the input token at the position where they predict a label. In
    training, a patched model of this kind refuses labels that only repeat the input tokens, since it would only learn
    to copy them (forward).
13. A step, the loss and its gradients, can be run twice without a trace, and compared (steps).

The file model has helpers that find the model inside wrappers, the arguments of a model's forward, and the
place where the model's weights are stored.
"""

from hf_packing.checks import refuse_older

refuse_older("torch", "transformers")  # before the imports below, of names that older versions do not have

from hf_packing.attention.cases import random_documents
from hf_packing.attention.forward import refuse_copied_labels, unpatched_on_error
from hf_packing.attention.kinds import prove_on_batch
from hf_packing.attention.kinds.packed import borders_required
from hf_packing.attention.kinds.padded import prove_unpadding, unpadding_of
from hf_packing.attention.kinds.split import ON_RANKS, block_of, proves_rows_on
from hf_packing.attention.kinds.trees import labels_of_trees, share_prefixes
from hf_packing.attention.model import (
    ALIGNED,
    compiles_forward,
    has_local_weights,
    inner_model,
    input_device,
    pad_token_of,
    takes_argument,
)
from hf_packing.attention.patch import (
    ProveInTraining,
    check_patched,
    patch_for_training,
    patch_model,
    patched,
    patched_copy_of,
    route_of_copy,
    unpatch_model,
)
from hf_packing.attention.proof import Proof
from hf_packing.attention.report import IsolationReport, check_isolation, predicts_tokens
from hf_packing.attention.route import is_patched, route_of, sees_labels
from hf_packing.attention.runs import NoLanguageModelError
from hf_packing.attention.small_copy import small_copy_of
from hf_packing.attention.snapshot import in_mode, restored_random_state, temporarily
from hf_packing.attention.steps import Step, StepDifference, StepRunner, compare

__all__ = [
    "ALIGNED",
    "ON_RANKS",
    "IsolationReport",
    "NoLanguageModelError",
    "Proof",
    "ProveInTraining",
    "Step",
    "StepDifference",
    "StepRunner",
    "block_of",
    "borders_required",
    "check_isolation",
    "check_patched",
    "compare",
    "compiles_forward",
    "has_local_weights",
    "in_mode",
    "inner_model",
    "input_device",
    "is_patched",
    "labels_of_trees",
    "pad_token_of",
    "patch_for_training",
    "patch_model",
    "patched",
    "patched_copy_of",
    "predicts_tokens",
    "prove_on_batch",
    "prove_unpadding",
    "proves_rows_on",
    "random_documents",
    "refuse_copied_labels",
    "restored_random_state",
    "route_of",
    "route_of_copy",
    "sees_labels",
    "share_prefixes",
    "small_copy_of",
    "takes_argument",
    "temporarily",
    "unpadding_of",
    "unpatch_model",
    "unpatched_on_error",
]
