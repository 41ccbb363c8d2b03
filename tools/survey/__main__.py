"""`python -m tools.survey`: measure every architecture of the installed transformers and write the page."""

import argparse
import multiprocessing
from collections import Counter
from pathlib import Path

import torch
import transformers

from tools.survey.heads import head_jobs, measure_heads
from tools.survey.measure import all_jobs, measure_all
from tools.survey.page import COMMAND, page, with_pictures, with_ranks, with_trees
from tools.survey.pictures import MeasuredPictures, measure_all_pictures, picture_jobs
from tools.survey.ranks import MeasuredRanks, measure_all_ranks
from tools.survey.steps import measure_all_steps, step_jobs
from tools.survey.trees import MeasuredTrees, measure_all_trees, tree_jobs


def print_steps(only: list[str] | None, processes: int) -> None:
    """Measure steps, and print those that are not proven, and how many there are of each status."""
    found = measure_all_steps([job for job in step_jobs() if not only or job.name in only], processes)
    for each in found:
        if each.status != "proven":
            print(
                f"{each.job.kind}, {each.job.name}, {each.job.dtype}, {each.job.batching}: {each.status} {each.reason}"
            )
    for (kind, dtype, status), number in Counter((e.job.kind, e.job.dtype, e.status) for e in found).items():
        print(f"{kind} in {dtype}: {number} {status}")


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/SUPPORTED_MODELS.md"))
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", nargs="*", help="model types to measure; default: all")
    parser.add_argument("--pictures", action="store_true", help="measure only pictures, in a page that exists")
    parser.add_argument("--trees", action="store_true", help="measure only rows of trees, in a page that exists")
    parser.add_argument("--ranks", action="store_true", help="measure only rows on two ranks, in a page that exists")
    parser.add_argument("--steps", action="store_true", help="print what the proof of a step finds, and write nothing")
    arguments = parser.parse_args()
    if arguments.steps:
        print_steps(arguments.only, arguments.processes)
        return
    everything = not (arguments.pictures or arguments.trees or arguments.ranks)
    pictures: list[MeasuredPictures] = []
    trees: list[MeasuredTrees] = []
    ranks: list[MeasuredRanks] = []
    jobs = [job for job in all_jobs() if not arguments.only or job[1] in arguments.only]
    if everything or arguments.pictures:
        names = [name for name in picture_jobs() if not arguments.only or name in arguments.only]
        pictures = measure_all_pictures(names, arguments.processes)
    if everything or arguments.trees:
        names = [name for name in tree_jobs() if not arguments.only or name in arguments.only]
        trees = measure_all_trees(names, arguments.processes)
    if everything or arguments.ranks:
        ranks = measure_all_ranks(jobs)
    statuses = [*(each.status for each in pictures), *(each.status for each in trees), *(each.status for each in ranks)]
    exact = statuses.count("exact")
    if not everything:
        text = arguments.output.read_text()
        text = with_pictures(text, pictures) if arguments.pictures else text
        text = with_trees(text, trees) if arguments.trees else text
        arguments.output.write_text(with_ranks(text, ranks) if arguments.ranks else text)
        print(f"{exact} of {len(statuses)} results are exact")
        return
    heads = [job for job in head_jobs() if not arguments.only or job[1] in arguments.only]
    results, of_heads = measure_all(jobs, arguments.processes), measure_heads(heads, arguments.processes)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(results, versions, of_heads, pictures, trees, ranks))
    exact += sum(each.exact for each in results) + sum(each.status == "exact" for each in of_heads)
    measured = len(results) + len(of_heads) + len(statuses)
    print(f"{exact} of {measured} results are exact; wrote {arguments.output}")


if __name__ == "__main__":
    main()
