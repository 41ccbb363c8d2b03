"""Keep packed documents apart inside a model, and prove it on that very model.

The rest of the package imports only from here, never from the files below. Ten ideas, each of which builds on those
before it:

1. A packed row is a row of tokens with borders between its segments. A patched model reads the row from its inputs and
   makes it the current row while its forward runs (packed_row).
2. Attention by segment: `packed_varlen` is registered with transformers, and calls a CUDA kernel or exact attention in
   plain torch (varlen, kernels, exact_attention).
3. A module is segment-local if its output for a row is its outputs for the segments, joined. A module that is not, such
   as a convolution or a recurrent layer, runs segment by segment: its arguments are split along their token axes, and
   its outputs are joined (by_segment, token_axes).
4. A search finds these modules by experiment: it watches one forward, and runs every module on the row and on its
   segments (search, module_checks).
5. A route is how documents are isolated in one model: an attention function, the inputs that the model is given, and
   the modules that run by segment (route).
6. The patch installs a route in a model: it replaces the model's forward with one that reads the row (patched_forward).
7. A probe runs a model on random documents, packed and alone, and leaves no trace (probe, snapshot). Two results count
   as the same if the measured effect of rounding explains their difference (tolerance).
8. The proof: replacing one document does not change the others, and every document has the same logits and gradients
   packed as alone (proof). `check_isolation` checks the first part on any model, patched or not (isolation).
9. `patch_model` installs the fastest route that it can prove, or raises with the reason (find_route, patch). If the
   model's weights are not in memory, the proof runs on a small copy (small_copy, with tiny sizes from tiny_model).
10. Some models, such as masked language models, see the input token at each label's position. They refuse labels that
    only repeat the input (patched_forward).

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
