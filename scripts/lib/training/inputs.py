"""What training reads: rows, draft vocabulary, target; and whether they belong together."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from scripts.lib.eagle3.closed_form import closed_form_start
from scripts.lib.eagle3.initial import initialise, start_from, warm_start
from scripts.lib.eagle3.layers import checked_boundaries
from scripts.lib.eagle3.model import Drafter, DrafterConfig
from scripts.lib.eagle3.target import TargetWeights
from scripts.lib.ground.errors import StageError
from scripts.lib.ground.manifest import Manifest, checked_shard, read_manifest
from scripts.lib.ground.stage import Job
from scripts.lib.training.feed import Feed
from scripts.lib.training.rolling import Rolled, is_rolling
from scripts.lib.training.rows import RowSet, load_rows, thinned
from scripts.lib.training.settings import TrainSettings
from scripts.lib.vocabulary.tables import Vocabulary, read_vocabulary


@dataclass(frozen=True)
class Inputs:
    """Checked inputs of one run. Where shards come and go, `rolled` plans them and the rows of `train` have no states."""

    train: RowSet
    heldout: RowSet
    vocabulary: Vocabulary
    target: TargetWeights
    boundaries: tuple[int, ...]
    rolled: Rolled | None


def read_inputs(job: Job, settings: TrainSettings) -> Inputs:
    """Read the inputs of `job`; StageError when one is damaged, they do not fit together, or nothing is left to train on.

    A drafter's `fraction` thins the train rows alone: all drafters are measured on the same held-out ones.
    """
    path = job.input("hidden")
    hidden = read_manifest(path, "hidden")
    target = read_target(job.input("target"))
    vocabulary = read_vocabulary(job.input("vocab"))
    boundaries = check_fit(path, hidden, target, vocabulary)
    rolled = Rolled.of(job) if is_rolling(job) else None
    whole = rolled.rows if rolled else load_rows(path.parent, hidden, "train")
    heldout = load_rows(path.parent, hidden, "eval")
    for split, found in (("train", whole), ("eval", heldout)):
        if not found.rows:
            raise StageError(
                f"{path}: none of {found.untrained} {split} rows has a trained position (an answer needs two tokens or more); "
                "check the loss spans of stage encode, or give it more samples"
            )
    train = thinned(whole, settings.fraction, settings.seed)
    if not train.rows:
        raise StageError(
            f"{path}: fraction {settings.fraction} leaves none of {len(whole.rows)} train rows; raise it, or give more samples"
        )
    return Inputs(train, heldout, vocabulary, target, boundaries, rolled)


def read_target(path: Path) -> TargetWeights:
    """The target behind its manifest at `path`."""
    for shard in read_manifest(path, "target").shards:
        checked_shard(path.parent, shard)
    return TargetWeights(path.parent)


def check_fit(path: Path, hidden: Manifest, target: TargetWeights, vocabulary: Vocabulary) -> tuple[int, ...]:
    """The boundaries of the states behind `path`; StageError when they, the target and the vocabulary do not fit."""
    text = target.config.get_text_config()
    wrong = [
        f"states have {name} {hidden.facts[fact]}, the target {value}"
        for name, fact, value in (
            ("hidden size", "hidden_size", text.hidden_size),
            ("number of layers", "num_layers", text.num_hidden_layers),
            ("final state", "final", "post-norm"),
        )
        if hidden.facts[fact] != value
    ]
    if len(vocabulary.t2d) != text.vocab_size:
        wrong.append(f"the draft vocabulary is for {len(vocabulary.t2d)} target tokens, the target has {text.vocab_size}")
    if wrong:
        raise StageError(f"{path}: {'; '.join(wrong)}; run stages vocab and hidden again for this target")
    return tuple(checked_boundaries(hidden.facts["boundaries"], text.num_hidden_layers))


def new_drafter(inputs: Inputs, settings: TrainSettings, device: str, feed: Feed | None) -> tuple[Drafter, list[str]]:
    """A drafter at its start in float32 on `device`, and the names of what it took over from the target.

    Without a `feed` nothing is solved from its rows: a checkpoint holds what came of that.
    """
    vocabulary = inputs.vocabulary
    like = DrafterConfig.from_target(inputs.target.config, len(vocabulary.d2t), inputs.boundaries)
    width = settings.intermediate_size or like.intermediate_size
    config = replace(
        like,
        intermediate_size=width,
        num_hidden_layers=settings.layers,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
    )
    drafter = Drafter(config, vocabulary.d2t, vocabulary.t2d).float()
    initialise(drafter, settings.seed)
    if settings.start_from:
        return drafter.to(device), start_from(drafter, Path(settings.start_from), inputs.target)
    if not settings.warm_start:
        return drafter.to(device), []
    taken = warm_start(drafter, inputs.target)
    drafter.to(device)
    if feed:
        closed_form_start(drafter, inputs.target.embedding(), feed.samples())
    return drafter, taken


def draft_head(inputs: Inputs) -> Tensor:
    """The rows of the target's head that teach, float32 [D, H]."""
    return inputs.target.head()[inputs.vocabulary.target_ids].float()
