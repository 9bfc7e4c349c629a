"""Makes shards: forward passes, checks, the file, and a receipt that says what is in it."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from scripts.lib.engines.protocol import RowStates, StateRequest, TargetEngine
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.files import write_json
from scripts.lib.ground.manifest import Shard
from scripts.lib.states.capture import Batching, Captured, batches, capture
from scripts.lib.states.checks import check_sample, sampled, unlike_greedy
from scripts.lib.states.format import write_rows
from scripts.lib.states.marks import receipt_path
from scripts.lib.states.reader import read_shard
from scripts.lib.states.reuse import Earlier
from scripts.lib.states.rounded import Rounded
from scripts.lib.states.rows import ShardPlan, TokenRow, digest
from scripts.lib.states.settings import HiddenSettings

MOST_UNLIKE = 0.05  # of greedily written tokens: servers batch and round otherwise, a shift by one leaves nearly nothing alike


@dataclass(frozen=True)
class Receipt:
    """What is known of a finished shard: a digest of the rows it was made of, and those left out, as (place, id, reason).

    Of the `greedy` positions, where the target wrote the next token as its first choice, `unlike` have another first choice now.
    `batches` holds for each row of the file the name of its batch and its number in it. `shard` describes the file, with the digest
    that was taken while it was written, and is None where no row is left.
    """

    rows: str
    rejected: tuple[tuple[int, str, str], ...]
    greedy: int
    unlike: int
    batches: tuple[tuple[str, int], ...]
    shard: Shard | None

    @classmethod
    def read(cls, path: Path) -> "Receipt":
        """The receipt at `path`."""
        data = json.loads(path.read_text())
        rejected = tuple((place, row, reason) for place, row, reason in data["rejected"])
        members = tuple((name, member) for name, member in data["batches"])
        return cls(data["rows"], rejected, data["greedy"], data["unlike"], members, Shard(**data["shard"]) if data["shard"] else None)


@dataclass(frozen=True)
class ShardWriter:
    """Writes shards into `folder`, a receipt for each into its `partial`, and knows which ones are done.

    One thread captures; what comes out may be finished by others.
    """

    folder: Path
    settings: HiddenSettings
    boundaries: Sequence[int]
    engine: Callable[[], TargetEngine]
    greedy: frozenset[str]
    earlier: Earlier
    batching: Batching

    def receipt(self, plan: ShardPlan) -> Receipt | None:
        """The receipt of a shard that an earlier attempt finished, None when the shard must be made."""
        if not receipt_path(self.folder, plan.name).exists():
            return None
        receipt, rows = Receipt.read(receipt_path(self.folder, plan.name)), plan.read()
        lost = {place for place, _, _ in receipt.rejected}
        kept = [row.id for place, row in enumerate(rows) if place not in lost]
        path = self.folder / plan.name
        whole = not kept or (path.exists() and list(read_shard(path).ids) == kept)
        return receipt if whole and receipt.rows == digest(rows) else None

    def write(self, plan: ShardPlan) -> Receipt:
        """Make the shard."""
        return self.finish(plan, self.capture(plan.read()))

    def capture(self, rows: Sequence[TokenRow]) -> Captured:
        """The forward passes of the `rows` of a shard. On a GPU the last of them may still be under way."""
        return capture(self.engine(), rows, self.boundaries, self.batching, self.earlier.states)

    def finish(self, plan: ShardPlan, captured: Captured) -> Receipt:
        """Checks, file and receipt of a shard. Raises StageError when the engine fails a check, OSError when the file cannot be written."""
        rows, states, defects = captured.rows, captured.wait(), captured.defects()
        good = [place for place, why in enumerate(defects) if why is None]
        rejected = tuple((place, rows[place].id, why) for place, why in enumerate(defects) if why)
        kept, own = [rows[place] for place in good], [states[place] for place in good]
        with self.engine().beside():
            if good:
                self._check_sample(captured, states, good)
            greedy, unlike = self._unlike_greedy(kept, own)
        members, rounded = self._members(rows), captured.rounded()
        shard = self._written(plan.name, kept, own, [rounded[place] for place in good if rounded]) if good else None
        receipt = Receipt(digest(rows), rejected, greedy, unlike, tuple(members[place] for place in good), shard)
        write_json(receipt_path(self.folder, plan.name), asdict(receipt))
        return receipt

    def _written(self, name: str, rows: Sequence[TokenRow], states: Sequence[RowStates], rounded: Sequence[Rounded]) -> Shard:
        path = self.folder / name
        digest_of_file = write_rows(path, rows, states, self.settings.storing, rounded)
        return Shard(name, len(rows), sum(len(row.input_ids) for row in rows), path.stat().st_size, digest_of_file)

    def _check_sample(self, captured: Captured, states: Sequence[RowStates], good: Sequence[int]) -> None:
        """Check one of the rows `good` against the reference. All are captured again if that one was rounded: seldom, after a defect."""
        place = good[sampled([captured.rows[place] for place in good])]
        if captured.whole not in (None, place):
            states = capture(self.engine(), captured.rows, self.boundaries, replace(self.batching, rounding=None)).wait()
        check_sample(self.engine(), captured.rows[place], states[place], self.boundaries, self.settings.noise)

    def _unlike_greedy(self, rows: Sequence[TokenRow], states: Sequence[RowStates]) -> tuple[int, int]:
        """Compare rows that were written greedily with their tokens: those counted, those unlike. Raises StageError for too many."""
        places = [place for place, row in enumerate(rows) if row.dataset in self.greedy]
        if not places:
            return 0, 0
        written = [rows[place] for place in places]
        unlike = unlike_greedy(self.engine(), written, [states[place] for place in places])
        greedy, total = sum(len(row.final_index) for row in written), int(unlike.sum())
        if total > MOST_UNLIKE * greedy:
            worst = written[int(np.argmax(unlike))]
            raise StageError(
                f"{total} of {greedy} tokens of greedy answers are not what the target would write now, most of them in row "
                f"{worst.id} of {worst.dataset}: states and tokens are shifted, or another target or template wrote the answers; "
                "delete responses of this dataset and run again, and report it if that does not help"
            )
        return greedy, total

    def coming(self, plan: ShardPlan) -> Iterator[StateRequest]:
        """What the engine will be asked for when `plan` is written, in this order."""
        rows = plan.read()
        for batch in batches([row.input_ids for row in rows], self.batching):
            members = [rows[index] for index in batch]
            if not self.earlier.knows(members):
                yield from (StateRequest(row.input_ids, row.final_index) for row in members)

    def _members(self, rows: Sequence[TokenRow]) -> dict[int, tuple[str, int]]:
        """Name of the batch of each of `rows`, and its number in it."""
        made: dict[int, tuple[str, int]] = {}
        for batch in batches([row.input_ids for row in rows], self.batching):
            name = self.earlier.batch([rows[index] for index in batch])
            made |= {index: (name, member) for member, index in enumerate(batch)}
        return made
