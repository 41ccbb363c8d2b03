"""`python -m tools.survey`: measure every architecture of the installed transformers and write the page."""

import argparse
import multiprocessing
from pathlib import Path

import torch
import transformers

from tools.survey.heads import head_jobs, measure_heads
from tools.survey.measure import all_jobs, measure_all
from tools.survey.page import COMMAND, page, with_pictures
from tools.survey.pictures import measure_all_pictures, picture_jobs


def main() -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/SUPPORTED_MODELS.md"))
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--only", nargs="*", help="model types to measure; default: all")
    parser.add_argument("--pictures", action="store_true", help="measure only pictures, in a page that exists")
    arguments = parser.parse_args()
    names = [name for name in picture_jobs() if not arguments.only or name in arguments.only]
    pictures = measure_all_pictures(names, arguments.processes)
    if arguments.pictures:
        arguments.output.write_text(with_pictures(arguments.output.read_text(), pictures))
        print(f"{sum(each.status == 'exact' for each in pictures)} of {len(pictures)} results are exact")
        return
    jobs = [job for job in all_jobs() if not arguments.only or job[1] in arguments.only]
    heads = [job for job in head_jobs() if not arguments.only or job[1] in arguments.only]
    results, of_heads = measure_all(jobs, arguments.processes), measure_heads(heads, arguments.processes)
    versions = f"transformers {transformers.__version__} and torch {torch.__version__.split('+')[0]}"
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(page(results, versions, of_heads, pictures))
    exact = sum(each.exact for each in results) + sum(each.status == "exact" for each in of_heads)
    exact += sum(each.status == "exact" for each in pictures)
    print(f"{exact} of {len(results) + len(of_heads) + len(pictures)} results are exact; wrote {arguments.output}")


if __name__ == "__main__":
    main()
