"""Rows of trees: documents that share prefixes."""

from pathlib import Path

from goldens.digests import digest_of_dataset
from goldens.inputs import labeled, related

import hf_packing as hfp


def packed(_: Path) -> dict[str, str]:
    """Rows of `pack(share_prefixes=...)`, their metrics, and the documents that `unpack` restores."""
    strategies = [
        hfp.BestFit(80),
        hfp.BestFit(40, overflow="drop", seed=3),
        hfp.ShortestPackFirst(80),
        hfp.Multipack(80, window=20),
        hfp.FirstCome(80, order="dataset"),
    ]
    found = {}
    for name, documents in {"related": related(), "no labels": related(8, 1).remove_columns("labels")}.items():
        for strategy in strategies:
            for fewest in (True, 4, 1):
                case = f"{name}, {strategy}, share_prefixes={fewest}"
                rows = hfp.pack(documents, strategy, share_prefixes=fewest)
                found[case] = digest_of_dataset(rows)
                found[f"{case}, unpacked"] = digest_of_dataset(hfp.unpack(rows))
    found["unrelated"] = digest_of_dataset(hfp.pack(labeled(), hfp.BestFit(80), share_prefixes=True))
    return found
