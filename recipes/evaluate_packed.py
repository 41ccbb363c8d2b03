"""Run tasks of lm-evaluation-harness, with the log-likelihoods of packed rows.

    python recipes/evaluate_packed.py --model_args pretrained=Qwen/Qwen3-0.6B --tasks arc_easy,hellaswag
    python recipes/evaluate_packed.py --model_args pretrained=Qwen/Qwen3-0.6B,share_prefixes=True --tasks hellaswag \\
        --num_fewshot 5
    accelerate launch recipes/evaluate_packed.py --model_args pretrained=outputs/sft,max_tokens=8192 --tasks my_task \\
        --include_path tasks --limit 100

Flags, prompts, answers, metrics and tables are those of `lm_eval --model hf`, which prints the same numbers, up to
rounding. --model_args also takes `max_tokens`, the tokens of a packed row, and `share_prefixes`. Log-likelihoods are
sums of float32 log-probabilities, also if the model is in bfloat16. Requests that differ only in their last token, such
as A, B, C and D after a question, run once. With share_prefixes, so does everything with which requests begin alike:
the examples of a few-shot prompt, and the question before its answers. Tasks that generate text run as in the harness.
"""

import sys
import warnings
from collections.abc import Sequence

import common
import torch
from accelerate.utils import gather_object

import hf_packing as hfp

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise hfp.MissingDependencyError('lm-evaluation-harness is missing: pip install "hf-packing[evaluate]"') from error


@register_model("packed")
class PackedHFLM(HFLM):
    """HFLM of lm-evaluation-harness, which packs the requests for log-likelihoods in rows without padding.

    Args:
        pretrained: as in HFLM.
        max_tokens: number of tokens in a row, or in the longest request if this is more.
        share_prefixes: whether to compute prefixes that requests share once.
        options: as in HFLM; `batch_size` is only for generating text, and `softmax_dtype` has no effect.
    """

    def __init__(
        self, pretrained: object, *, max_tokens: int = 16384, share_prefixes: bool = False, **options: object
    ) -> None:
        super().__init__(pretrained, **options)
        if self.backend != "causal":
            raise hfp.PackingError(f"backend: expected a causal language model, got {self.backend!r}")
        self.max_tokens, self.share_prefixes = max_tokens, share_prefixes
        hfp.patch_model(self.model, trees=share_prefixes)

    def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihoods of texts. The windows of all texts are packed together."""
        kept, self.batch_size_per_gpu = self.batch_size_per_gpu, sys.maxsize
        try:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.batch_size_per_gpu = kept

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,  # noqa: ARG002
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether all its tokens are the most probable ones.

        Requests are strings that a cache knows them by, tokens of a context, and tokens of a continuation.
        """
        most, rows = self.max_length, []
        for _, context, continuation in requests:
            if not (context and 1 <= len(continuation) <= most):
                raise hfp.PackingError(
                    f"requests: expected a context and a continuation of 1 to {most} tokens, got {len(context)} and "
                    f"{len(continuation)} tokens"
                )
            # cut on the left, as HFLM does; the model does not see the last token
            tokens = [*context, *continuation][-(most + 1) :]
            rows.append({"input_ids": tokens, "labels": [-100] * (len(tokens) - len(continuation)) + continuation})
        if cut := sum(len(context) + len(continuation) > most + 1 for _, context, continuation in requests):
            warnings.warn(f"{cut} of {len(requests)} requests are longer than {most} tokens, and cut", stacklevel=2)

        parts = gather_object([rows])  # score shares out the documents of all processes
        begin = sum(map(len, parts[: self.rank]))
        dtype = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
            scores = hfp.score(
                self.model,
                [row for part in parts for row in part],
                max_tokens=self.max_tokens,
                share_prefixes=self.share_prefixes,
                progress=not disable_tqdm,
            )
        own = slice(begin, begin + len(rows))
        answers = list(zip(scores.log_likelihood[own].tolist(), scores.greedy[own].tolist(), strict=True))
        for (name, _, _), answer in zip(requests, answers, strict=True):
            if name is not None:  # a window of a longer text has no name
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers


def main(flags: Sequence[str] | None = None) -> None:
    sys.argv = ["lm-eval", "run", "--model", "packed", *(sys.argv[1:] if flags is None else flags)]
    cli_evaluate()


if __name__ == "__main__":
    common.run(main)
