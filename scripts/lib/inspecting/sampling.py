"""The head and a seeded sample of any source."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi

from scripts.lib.formats.record import Record
from scripts.lib.ground.errors import StageError
from scripts.lib.sources.fetching import FETCHERS
from scripts.lib.sources.hub import HUB_ERRORS
from scripts.lib.sources.json_stream import Cut
from scripts.lib.sources.local import local_files
from scripts.lib.sources.records import read_records
from scripts.lib.sources.settings import COMMIT, SourceSettings
from scripts.lib.sources.wheels import matching

SHUFFLE_BUFFER = 10_000  # records of a hub stream among which the next is drawn


@dataclass(frozen=True)
class Size:
    """How many records to look at: the first `head`, and `sample` drawn with `seed` from the first `limit`."""

    head: int = 100
    sample: int = 1000
    limit: int = 200_000
    seed: int = 7

    def __post_init__(self) -> None:
        for name in ("head", "sample", "limit"):
            if getattr(self, name) < 1:
                raise StageError(f"--{name} {getattr(self, name)} looks at no record; give 1 or more")


@dataclass
class Sample:
    """Records looked at, the head first; `seen` is how many went by, `complete` whether these were all, `cuts` the files that end early."""

    records: list[Record] = field(default_factory=list)
    seen: int = 0
    complete: bool = True
    cuts: list[Cut] = field(default_factory=list)


def sample_source(settings: SourceSettings, size: Size, folder: Path) -> Sample:
    """A sample of the source; what has to be fetched for it goes into `folder`. Files on this machine are read in place."""
    if settings.address.kind == "hub" and not settings.members:
        return sample_hub(settings, size)
    sample = Sample()
    records = chain.from_iterable(read_records(path, sample.cuts.append) for path in source_files(settings, folder))
    return drawn(records, size, sample)


def source_files(settings: SourceSettings, folder: Path) -> list[Path]:
    """The files of the source in the order in which `fetch` would publish them."""
    if settings.address.kind != "path":
        return sorted(FETCHERS[settings.address.kind](settings, folder).files)
    root, names = local_files(settings.address.locator)
    if settings.members or settings.exclude:
        names = matching(names, settings.members or ("*",), settings.exclude, settings.address.locator)
    return [root / name for name in names]


def drawn(records: Iterable[Record], size: Size, sample: Sample) -> Sample:
    """Fill `sample` by one pass: the head as it comes, of the rest each with the same chance."""
    stream, chance = iter(records), random.Random(size.seed)
    head, rest = list(islice(stream, size.head)), list[Record]()
    sample.seen = len(head)
    for record in islice(stream, max(size.limit - size.head, 0)):
        sample.seen += 1
        if len(rest) < size.sample:
            rest.append(record)
        elif (place := chance.randrange(sample.seen - len(head))) < size.sample:
            rest[place] = record
    sample.complete = next(stream, None) is None
    sample.records = [*head, *rest]
    return sample


def sample_hub(settings: SourceSettings, size: Size) -> Sample:
    """The head of a hub dataset and a draw from its shuffled shards, streamed: nothing is downloaded as a whole."""
    table = hub_stream(settings)
    shuffled = table.shuffle(seed=size.seed, buffer_size=SHUFFLE_BUFFER)
    try:
        records = [*table.take(size.head), *shuffled.take(size.sample)]
    except HUB_ERRORS as error:
        raise StageError(f"{settings.text}: reading broke off ({error}); try again, or read its files by --members") from error
    return Sample(records, len(records), complete=len(records) < size.head + size.sample)


def hub_stream(settings: SourceSettings) -> Any:
    """One split of the dataset as a stream; StageError naming the choices when several leave it open."""
    repository = settings.address.locator
    try:
        loaded = datasets.load_dataset(repository, settings.subset, split=settings.split, revision=settings.revision, streaming=True)
    except HUB_ERRORS as error:
        raise StageError(f"hub:{repository}: {error}; check id, --revision, --subset and --split, and the network") from error
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) != 1:
        raise StageError(f"hub:{repository}: several splits, give --split one of {', '.join(sorted(loaded))}")
    (only,) = loaded.values()
    return only


def pinned_revision(repository: str, revision: str | None) -> str:
    """`revision` as a full commit hash; without one, or for a branch or tag, the commit that it stands for now."""
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    try:
        return str(HfApi().dataset_info(repository, revision=revision).sha)
    except HUB_ERRORS as error:
        raise StageError(f"hub:{repository}: {error}; check the id and the network, or give --revision a commit hash") from error
