"""Evaluate a model on tasks of lm-evaluation-harness, with the log-likelihoods of packed rows.

    python recipes/evaluate_packed.py --model Qwen/Qwen3-0.6B --tasks arc_easy,hellaswag
    python recipes/evaluate_packed.py --model outputs/sft --tasks my_task --include_path tasks --limit 100
    python recipes/evaluate_packed.py --model Qwen/Qwen3-0.6B --tasks hellaswag --num_fewshot 5 --share_prefixes

Prompts, answers, metrics and tables are those of the harness; `lm_eval --model hf` prints the same numbers, up to
rounding. Log-likelihoods are sums of float32 log-probabilities, also if the model is in bfloat16. Requests that differ
only in their last token, such as A, B, C and D after a question, run once. With --share_prefixes, so does everything
with which requests begin alike: the examples of a few-shot prompt, and the question before its answers. Tasks that
generate text run as in the harness.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from checkpoints import positive
from process_group import end_process_group

import hf_packing as hfp

try:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table, simple_parse_args_string
except ImportError as error:
    raise hfp.MissingDependencyError('lm-evaluation-harness is missing: pip install "hf-packing[evaluate]"') from error

Request = tuple[tuple[str, str] | None, list[int], list[int]]
"""The strings that a cache knows the request by, the tokens of its context, and those of its continuation."""
Document = tuple[tuple[int, ...], int]
"""The tokens of a request, and how many of the last ones are scored."""
Answer = tuple[float, bool]
"""The log-likelihood of a continuation, and whether each of its tokens is the most probable one."""


class PackedHFLM(HFLM):
    """HFLM of lm-evaluation-harness, which packs the requests for log-likelihoods in rows without padding.

    Args:
        pretrained: as in HFLM.
        max_tokens: number of tokens in a row. A longer request is a row of its own.
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
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,  # noqa: ARG002
    ) -> list[Answer]:
        documents = [self._document(context, continuation) for _, context, continuation in requests]
        known = self._answers(list(dict.fromkeys(documents)), disable_tqdm)
        answers = [known[each] for each in documents]
        for (name, _, _), answer in zip(requests, answers, strict=True):
            if name is not None:  # a window of a longer text has no name
                self.cache_hook.add_partial("loglikelihood", name, answer)
        return answers

    def _document(self, context: list[int], continuation: list[int]) -> Document:
        """Return the tokens of a request, cut on the left as HFLM does, and how many of the last ones are scored.

        The model does not see the last token, so there may be one token more than it takes.
        """
        for name, tokens, most in [("context", context, None), ("continuation", continuation, self.max_length)]:
            if not tokens or (most is not None and len(tokens) > most):
                limit = "at least 1 token" if most is None else f"1 to {most} tokens"
                raise hfp.PackingError(f"{name}: expected {limit}, got {len(tokens)}")
        return tuple([*context, *continuation][-(self.max_length + 1) :]), len(continuation)

    def _answers(self, documents: list[Document], quiet: bool) -> dict[Document, Answer]:
        """Return the answers by document. On several processes, score deals the documents of all of them."""
        alone = self.world_size == 1
        parts, own = ([documents], 0) if alone else (gather_object([documents]), PartialState().process_index)
        begin, end = list(pairwise(accumulate(map(len, parts), initial=0)))[own]
        rows = [
            {"input_ids": list(tokens), "labels": [-100] * (len(tokens) - scored) + list(tokens[-scored:])}
            for part in parts
            for tokens, scored in part
        ]
        if not rows:
            return {}
        with self._autocast():
            scores = hfp.score(
                self.model,
                rows,
                max_tokens=self.max_tokens,
                share_prefixes=self.share_prefixes,
                progress=not quiet,
            )
        found = zip(scores.log_likelihood[begin:end].tolist(), scores.greedy[begin:end].tolist(), strict=True)
        return dict(zip(documents, found, strict=True))

    def _autocast(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)


def parse(flags: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="name or folder")
    parser.add_argument("--tasks", required=True, help="names of tasks, groups or tags, with commas between them")
    parser.add_argument("--max_tokens", type=positive, default=16384, help="tokens of a packed row")
    parser.add_argument(
        "--share_prefixes", action="store_true", help="compute examples, and questions before their answers, once"
    )
    parser.add_argument("--max_length", type=positive, help="tokens of a request; default: as many as the model takes")
    parser.add_argument("--num_fewshot", type=int, help="examples in each prompt; default: as the task says")
    parser.add_argument("--limit", type=float, help="documents of each task, or their share if below 1; default: all")
    parser.add_argument("--batch_size", type=positive, default=8, help="of tasks that generate text")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, ...; default: that of the weights")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda:1, ...")
    parser.add_argument("--model_args", default="", help="further arguments of HFLM, such as peft=FOLDER,revision=main")
    parser.add_argument("--apply_chat_template", action="store_true", help="write prompts by the chat template")
    parser.add_argument("--include_path", help="a folder with YAML files of further tasks")
    parser.add_argument("--output", type=Path, help="a JSON file for the results; overwritten")
    return parser.parse_args(flags)


def main(flags: Sequence[str] | None = None) -> dict | None:
    """Print the table of results; return them on the first process, and None on all others."""
    arguments = parse(flags)
    tasks = TaskManager(include_path=arguments.include_path)
    names = [name.strip() for name in arguments.tasks.split(",") if name.strip()]
    if unknown := [name for name in names if not tasks.match_tasks([name])]:
        raise SystemExit(f"--tasks: expected names that `lm_eval ls tasks` shows, got {', '.join(unknown)}")
    names_of_options = ("max_tokens", "share_prefixes", "max_length", "batch_size", "dtype", "device")
    options = {name: getattr(arguments, name) for name in names_of_options}
    further = simple_parse_args_string(arguments.model_args)
    if twice := [name for name in further if name in options]:
        raise SystemExit(f"--model_args: expected arguments without a flag of their own, got {', '.join(twice)}")
    model = PackedHFLM(arguments.model, **options, **further)
    results = lm_eval.simple_evaluate(
        model,
        tasks=names,
        num_fewshot=arguments.num_fewshot,
        limit=arguments.limit,
        apply_chat_template=arguments.apply_chat_template,
        task_manager=tasks,
        log_samples=False,
    )
    if results is not None:
        print(make_table(results))
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(results["results"], indent=2, default=str) + "\n")
    return results


if __name__ == "__main__":
    main()
    end_process_group()
