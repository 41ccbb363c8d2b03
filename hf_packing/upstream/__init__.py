"""The doors to other libraries: what is private in them, or differs between the versions that we support.

Nothing else in the package uses a private name of these libraries, or asks for a version of one. `NEEDED` also lists
what the package imports from their submodules, which is public in name only. `versions` and `make doors` say what a new
version has changed, and what needs it. This file imports none of the libraries, so that it can always say so.
"""

import inspect
import re
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pkgutil import resolve_name

import hf_packing
from hf_packing.checks import NEWEST, wanted_versions

NEEDED = {
    "accelerate:Accelerator": ("_models _dataloaders", "the proof of a model as it was prepared"),
    "accelerate.data_loader": (
        "DataLoaderDispatcher DataLoaderStateMixin prepare_data_loader",
        "the loaders of attach and prepare_dataloader",
    ),
    "accelerate.hooks:add_hook_to_module": ("_hf_hook", "a model whose weights accelerate has offloaded"),
    "accelerate.state": ("GradientState is_initialized", "the steps of a loop, and the dataset that a batch is of"),
    "accelerate.utils": (
        "DistributedType gather_object recursively_apply reduce send_to_device",
        "what ranks plan and prove together",
    ),
    "datasets:Dataset": ("_fingerprint _indices", "the cache of pack, and the order of its rows"),
    "datasets:IterableDataset": (
        "_ex_iterable _formatting _distributed _token_per_repo_id _resolve_features _starting_state_dict",
        "packing of streams",
    ),
    "datasets.config": ("HF_DATASETS_CACHE", "the cache of pack"),
    "datasets.fingerprint": ("Hasher get_temporary_cache_files_directory", "the cache of pack"),
    "datasets.formatting": ("get_formatter", "lazy packs"),
    "datasets.formatting.formatting": ("LazyBatch LazyRow", "packing by map"),
    "datasets.iterable_dataset": (
        "_BaseExamplesIterable BufferShuffledExamplesIterable CyclingMultiSourcesExamplesIterable "
        "FilteredExamplesIterable FormattedExamplesIterable HorizontallyConcatenatedMultiSourcesExamplesIterable "
        "MappedExamplesIterable RebatchedArrowExamplesIterable RepeatExamplesIterable SelectColumnsIterable "
        "SkipExamplesIterable TakeExamplesIterable VerticallyConcatenatedMultiSourcesExamplesIterable",
        "shares and states of streams",
    ),
    "datasets.table": ("MemoryMappedTable", "packed rows that stay on disk"),
    "datasets.utils": ("tqdm", "lines of progress"),
    "torch:Tensor": (
        "_backward_hooks _post_accumulate_grad_hooks _make_subclass _base _is_view",
        "losses that are computed in chunks, and the proof of the step",
    ),
    "torch._C": ("DisableTorchFunctionSubclass", "losses that are computed in chunks"),
    "torch._dynamo": ("mark_static maybe_mark_dynamic", "compiling a model once for all batches"),
    "torch._dynamo.eval_frame": ("skip_code", "compiling a patched model"),
    "torch._dynamo.eval_frame:OptimizedModule": ("_orig_mod", "compiled models"),
    "torch._dynamo.eval_frame:innermost_fn": ("_torchdynamo_orig_callable", "compiled models"),
    "torch.distributed:ProcessGroup": ("_get_backend _device_types", "documents on several ranks"),
    "torch.distributed.fsdp:FullyShardedDataParallel": ("_fsdp_wrapped_module", "FSDP with activation checkpointing"),
    "torch.nn:Module": (
        "_modules _parameters _buffers _compiled_call_impl _forward_hooks _forward_hooks_with_kwargs "
        "_forward_hooks_always_called _forward_pre_hooks _forward_pre_hooks_with_kwargs _backward_hooks "
        "_backward_pre_hooks",
        "proofs that leave models as they were",
    ),
    "torch.nn.attention.flex_attention": ("AuxRequest BlockMask flex_attention", "attention with FlexAttention"),
    "torch.nn.modules.module": (
        "_global_forward_hooks _global_forward_pre_hooks _global_backward_hooks _global_backward_pre_hooks",
        "proofs without the hooks of users",
    ),
    "torch.nn.modules.dropout": ("_DropoutNd", "proofs in training mode"),
    "torch.utils._pytree": ("tree_leaves tree_map", "losses that are computed in chunks"),
    "transformers:AutoModelForCausalLM": ("_model_mapping", "hf-packing check"),
    "transformers:PreTrainedConfig": (
        "_attn_implementation _attn_implementation_internal",
        "the check that nothing has changed attention after the patch",
    ),
    "transformers:PreTrainedModel": (
        "_can_set_attn_implementation _from_config _gradient_checkpointing_func",
        "patch_model",
    ),
    "transformers:Trainer": (
        "_get_train_sampler _set_signature_columns_if_needed _signature_columns",
        "the columns and the sampler of a trainer that is attached",
    ),
    "transformers.integrations.hub_kernels": ("is_kernel", "models that were loaded with a kernel from the hub"),
    "transformers.masking_utils": (
        "and_masks bidirectional_mask_function causal_mask_function chunked_overlay find_packed_sequence_indices "
        "flash_attention_mask sliding_window_bidirectional_overlay sliding_window_overlay",
        "patch_model, which replaces masks by the borders of documents",
    ),
    "transformers.masking_utils:and_masks": ("mask_functions", "patch_model with a sliding window or chunks"),
    "transformers.modeling_flash_attention_utils": ("lazy_import_flash_attention", "kernels from the hub"),
    "transformers.models.auto.modeling_auto": (
        "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "finding out whether a model predicts the next token or masked ones",
    ),
    "transformers.trainer_utils": ("get_last_checkpoint", "resuming from the last checkpoint"),
    "transformers.utils": ("ModelOutput logging", "outputs of padded batches, and hf-packing check"),
    "transformers.utils.chat_template_utils": ("render_jinja_template", "tokenizing chats"),
    "trl.trainer.sft_trainer": ("DataCollatorForLanguageModeling", "attaching an SFTTrainer"),
}
"""Private names of other libraries, and names in their submodules, by where they are, and what needs them."""


def broken_doors() -> Iterator[str]:
    """Yield a sentence for each name that an installed library does not have any more."""
    for place, (names, what) in NEEDED.items():
        library = place.partition(":")[0].partition(".")[0]
        try:
            installed = f"{library} {version(library)}"
        except PackageNotFoundError:  # TRL, which is optional
            continue
        try:
            owner = resolve_name(place)
        except (ImportError, AttributeError, RuntimeError):  # TRL raises RuntimeError if an import in it fails
            yield f"{installed} no longer has {place.replace(':', '.')}, or cannot import it, needed for {what}"
            continue
        source = ""
        lacking = [name for name in names.split() if not hasattr(owner, name)]
        if lacking and not inspect.ismodule(owner):  # instances and closures may have it
            with suppress(TypeError, OSError):  # what is compiled has none
                source = inspect.getsource(owner)
        for name in lacking:
            if not re.search(rf"\b{name}\b", source):
                yield f"{installed} no longer has {name} of {place}, needed for {what}"


def versions() -> str:
    """Return the versions of the libraries that hf_packing works with, for a bug report.

    Returns:
        A line for each library, with the installed version, the versions that are supported, and the newest one that
        was tested; then a line for each name inside of a library that its installed version does not have any more,
        and what needs it.

    Example:
        >>> import hf_packing as hfp
        >>> print(hfp.versions().splitlines()[0].split()[0])
        hf-packing
    """
    lines = [f"hf-packing {hf_packing.__version__}"]
    for library, newest in NEWEST.items():
        try:
            found = version(library)
        except PackageNotFoundError:
            found = "not installed"
        lines.append(f"{library} {found} (supported: {wanted_versions(library)}, tested up to {newest})")
    return "\n".join([*lines, *broken_doors()])
