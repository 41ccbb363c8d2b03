"""All drawn pictures of the README and of docs.

python docs/pictures/draw.py
"""

from collections.abc import Callable
from pathlib import Path

import strategies
import training
from canvas import save
from matplotlib.figure import Figure

HERE = Path(__file__).parent

PICTURES: dict[str, Callable[[], Figure]] = {
    "best_fit.png": strategies.best_fit,
    "bucket.png": strategies.bucket,
    "bucket_batches.png": training.bucket_batches,
    "bucket_by_length.png": strategies.bucket_by_length,
    "first_come.png": strategies.first_come,
    "fixed_length.png": strategies.fixed_length,
    "isolation.png": training.isolation,
    "multipack.png": strategies.multipack,
    "non_negative_least_squares.png": strategies.non_negative_least_squares,
    "optimal.png": strategies.optimal,
    "packed_row.png": training.packed_row,
    "packing.png": training.packing,
    "pipeline.svg": training.pipeline,
    "routes.png": training.routes,
    "shards.png": training.shards,
    "shortest_pack_first.png": strategies.shortest_pack_first,
    "token_budget.png": training.token_budget,
}


def main(folder: Path = HERE) -> None:
    for name, draw in PICTURES.items():
        save(draw(), folder / name)


if __name__ == "__main__":
    main()
