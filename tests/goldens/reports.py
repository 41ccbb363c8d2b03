"""The numbers and texts of reports, without the time that planning took."""

from pathlib import Path
from typing import Any

from goldens.digests import digest
from goldens.inputs import LONGEST, dataset, related, sets_of_lengths

import hf_packing as hfp


def made(_: Path) -> dict[str, str]:
    """Parts of the reports on lengths, on a dataset and on documents that share prefixes."""
    found: dict[str, str] = {}
    for name, lengths in sets_of_lengths().items():
        if lengths.any():
            _add(found, name, hfp.packing_report(lengths, (32, LONGEST), ranks=2, padded_rows=4))
    strategies = [hfp.BestFit(LONGEST, overflow="truncate"), hfp.FirstCome(32), hfp.Bucket((16, 32, LONGEST))]
    _add(found, "dataset", hfp.packing_report(dataset(), strategies=strategies, linear_cost=64, source="here"))
    _add(found, "shared prefixes", hfp.packing_report(related(), 80))
    return found


def _add(found: dict[str, str], name: str, report: hfp.PackingReport) -> None:
    for part, value in report.to_dict().items():
        if part == "strategies":
            for row in value:
                found[f"{name}, {row['strategy']}"] = digest(_without_time(row))
        else:
            found[f"{name}, {part}"] = digest(value)


def _without_time(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != "seconds"}
