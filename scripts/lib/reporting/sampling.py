"""Which raw rows became prepared rows: the part of a plan that needs nothing but the manifests of `prepare`."""

from collections import Counter
from collections.abc import Mapping, Sequence

from scripts.lib.ground.manifest import Manifest
from scripts.lib.reporting.table import Table, number

NOT_SAMPLED = "not_sampled"


def rejected(manifest: Manifest) -> int:
    """Rows that could not be used, without those that were only not sampled."""
    return sum(count for reason, count in manifest.counts.rejected.items() if reason != NOT_SAMPLED)


def kept_by_kind(manifests: Mapping[str, Manifest]) -> Counter[str]:
    """Kept rows of each kind of dataset, native and prompts."""
    kept: Counter[str] = Counter()
    for manifest in manifests.values():
        kept[manifest.facts["kind"]] += manifest.counts.rows_out
    return kept


def rows_table(manifests: Mapping[str, Manifest]) -> Table:
    """Raw rows of each dataset and what became of them, with the sums: raw = rejected + not sampled + kept."""
    header = ["dataset", "kind", "partition", "licence", "raw rows", "rejected", "not sampled", "kept", "native", "prompts"]
    figures = {name: row_figures(manifest) for name, manifest in manifests.items()}
    lines = [
        [name, facts["kind"], facts["partition"], facts["licence"] or "not stated", *map(number, figures[name])]
        for name, facts in ((name, manifest.facts) for name, manifest in manifests.items())
    ]
    sums = [sum(column) for column in zip(*figures.values(), strict=True)]
    return Table(header, [*lines, ["all", "", "", "", *map(number, sums)]], header[:4])


def row_figures(manifest: Manifest) -> Sequence[int]:
    """Raw, rejected, not sampled, kept, kept as native, kept as prompts."""
    counts, native = manifest.counts, manifest.facts["kind"] == "native"
    kept = counts.rows_out
    return counts.rows_in, rejected(manifest), counts.rejected.get(NOT_SAMPLED, 0), kept, kept * native, kept * (not native)


def reasons_table(manifests: Mapping[str, Manifest]) -> Table:
    """Why rows were rejected, by dataset and reason."""
    lines = [
        [name, reason, number(count), f"{count / manifest.counts.rows_in:.2%}"]
        for name, manifest in manifests.items()
        for reason, count in sorted(manifest.counts.rejected.items())
        if reason != NOT_SAMPLED
    ]
    return Table(["dataset", "reason", "rows", "share of raw rows"], lines, ("dataset", "reason"))
