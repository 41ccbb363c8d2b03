"""Keep packed documents apart inside a model, and prove it on that very model.

Other rooms import from here, and from no file below. Ten ideas, in the order in which they build on each other:

1. A packed row is a row of tokens with borders between its segments. A patched model reads it from its inputs, and it
   is the current row while the model's forward runs (packed_row).
2. Attention by segment: `packed_varlen` is registered with transformers, and calls a CUDA kernel or exact attention in
   plain torch (varlen, kernels, exact_attention).
3. A module that is not segment-local, such as a convolution or a state, runs segment by segment: its arguments are cut
   along their axes of tokens, and its outputs are joined (by_segment, token_axes).
4. Which modules these are is found by experiment: a search watches one forward, and tries every module on the row and
   on its segments (search, module_checks).
5. A route is what keeps documents apart in one model: an attention function, the inputs that the model is given, and
   the modules that run by segment (route).
6. The patch puts a route into a model: its forward is replaced by one that reads the row (patched_forward).
7. A probe runs a model on random documents, packed and alone, and leaves no trace (probe, snapshot). Whether two
   results are the same is decided by the measured effect of rounding (tolerance).
8. The proof: replacing a document changes no other, and all are as they are alone, in logits and gradients (proof).
   `check_isolation` asks the same of any model, patched or not (isolation).
9. `patch_model` installs the fastest route that is proven, or raises with the reason (find_route, patch). A model
   without weights in memory is proven on a small copy (small_copy, with tiny sizes from tiny_model).
10. Some models see the tokens that their labels ask for; labels that only repeat them are refused (patched_forward).

inspect_model looks into any model: what wraps it, which arguments it takes, where its weights are.
"""

from hf_packing.attention.inspect_model import has_local_weights, inner_model, input_device, takes_argument
from hf_packing.attention.isolation import IsolationReport, check_isolation
from hf_packing.attention.patch import (
    check_patched,
    patch_in_precision,
    patch_model,
    patched,
    unpatch_model,
    unpatched_on_error,
)
from hf_packing.attention.patched_forward import refuse_copied_labels, sees_labels
from hf_packing.attention.probe import random_documents
from hf_packing.attention.route import is_patched
from hf_packing.attention.small_copy import small_copy_of
from hf_packing.attention.tiny_model import architectures, tiny_model
from hf_packing.attention.tolerance import NoLanguageModelError

__all__ = [
    "IsolationReport",
    "NoLanguageModelError",
    "architectures",
    "check_isolation",
    "check_patched",
    "has_local_weights",
    "inner_model",
    "input_device",
    "is_patched",
    "patch_in_precision",
    "patch_model",
    "patched",
    "random_documents",
    "refuse_copied_labels",
    "sees_labels",
    "small_copy_of",
    "takes_argument",
    "tiny_model",
    "unpatch_model",
    "unpatched_on_error",
]
