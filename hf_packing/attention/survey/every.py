"""Every architecture of the installed transformers, measured in several processes."""

import logging
import multiprocessing

import transformers
from tqdm import tqdm

from hf_packing.attention.survey.architectures import VARIANTS
from hf_packing.attention.survey.measure import Measured, measure
from hf_packing.attention.survey.table import KINDS
from hf_packing.attention.survey.tiny import architectures


def all_jobs() -> list[tuple[str, str]]:
    """(kind, architecture), with the variants."""
    jobs = [(kind, name) for kind in KINDS for name in architectures(kind)]
    return jobs + [("causal", name) for name in sorted(VARIANTS)]


def measure_every(jobs: list[tuple[str, str]], processes: int) -> list[Measured]:
    """In the order of the jobs."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, quiet, maxtasksperchild=16) as pool:
        return list(tqdm(pool.imap(measure_job, jobs), total=len(jobs), unit=" architectures"))


def measure_job(job: tuple[str, str]) -> Measured:
    return measure(*job)


def quiet() -> None:
    """Many of the hundreds of models warn of their own defaults."""
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
