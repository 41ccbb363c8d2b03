"""All drawn pictures of the README and of docs.

python docs/pictures/draw.py
"""

from collections.abc import Callable
from pathlib import Path

import draw_strategies
import draw_training
import draw_trees
from canvas import save
from matplotlib.figure import Figure

HERE = Path(__file__).parent

PICTURES: dict[str, Callable[[], Figure]] = {
    "best_fit.png": draw_strategies.best_fit,
    "bucket.png": draw_strategies.bucket,
    "bucket_batches.png": draw_training.bucket_batches,
    "bucket_by_length.png": draw_strategies.bucket_by_length,
    "chat_tree.png": draw_trees.chat_tree,
    "first_come.png": draw_strategies.first_come,
    "fixed_length.png": draw_strategies.fixed_length,
    "house.svg": draw_training.house,
    "isolation.png": draw_training.isolation,
    "length_schedule.png": draw_training.length_schedule,
    "multipack.png": draw_strategies.multipack,
    "non_negative_least_squares.png": draw_strategies.non_negative_least_squares,
    "optimal.png": draw_strategies.optimal,
    "packed_row.png": draw_training.packed_row,
    "packing.png": draw_training.packing,
    "ranks_per_document.png": draw_training.ranks_per_document,
    "routes.png": draw_training.routes,
    "shared_prefixes.png": draw_trees.shared_prefixes,
    "shortest_pack_first.png": draw_strategies.shortest_pack_first,
    "token_budget.png": draw_training.token_budget,
}


def main(folder: Path = HERE) -> None:
    for name, draw in PICTURES.items():
        save(draw(), folder / name)


if __name__ == "__main__":
    main()
