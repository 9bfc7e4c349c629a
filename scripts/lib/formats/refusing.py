"""What the stage says when too few rows passed: what is there, what was expected, and the config lines that would accept it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from scripts.lib.formats.choosing import Choice, rejection_share
from scripts.lib.formats.detecting import detected, labels
from scripts.lib.formats.record import Record
from scripts.lib.formats.scanning import Reader, Scan, head_records
from scripts.lib.formats.settings import DatasetSettings
from scripts.lib.ground.errors import StageError

SHOWN = 20
LOOK = "python -m scripts.inspect_source shows what the records hold"
# What labels that no format knows usually mean.
LIKELY_ROLES = {
    **dict.fromkeys(("human", "prompter", "customer", "environment", "instruction"), "user"),
    **dict.fromkeys(("model", "bot", "agent", "gpt", "chatgpt", "bing", "bard", "claude", "output"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response", "tool_result", "ipython"), "tool"),
    **dict.fromkeys(("developer", "system_prompt"), "system"),
}


def check_yield(reader: Reader, found: Scan, choice: Choice, reasons: Mapping[str, int], listed: Path) -> None:
    """Raise StageError when fewer than `samples` rows passed, or when a larger share than max_rejected did not.

    `listed` is the file that holds every rejection.
    """
    dataset, rows, share = reader.dataset, len(choice.rows), rejection_share(found, choice)
    wanted = dataset.samples or 1
    if not found.records:
        files = ", ".join(path.name for path in reader.paths[:SHOWN]) or "none"
        raise StageError(
            f"{dataset.name}: 0 records in its files ({files}), {wanted} rows wanted; correct `source`, `members` or `exclude`"
        )
    if rows < wanted:
        problem = f"{rows} of {wanted} rows wanted"
        entry: dict[str, Any] = {"samples": rows} if rows else {}
        remedy = f"correct the mapping or `max_prompt_tokens`, or set `samples` to {rows} or less" if rows else "correct the mapping"
    elif dataset.max_rejected is not None and share > dataset.max_rejected:
        problem = f"rejection share {share:.3f} is over max_rejected {dataset.max_rejected}"
        entry = {"max_rejected": int(share * 1000 + 1) / 1000}
        remedy = "correct the mapping, or raise `max_rejected`"
    else:
        return
    head = head_records(reader.paths)
    check = " (check the roles: they are guessed)" if any(reason.startswith("unknown_role:") for reason in reasons) else ""
    lines = accepting(dataset, head, reasons) | entry
    accept = f"config that would accept them: {flow({'datasets': {dataset.name: lines}})}{check}" if lines else LOOK
    raise StageError(
        f"{dataset.name}: {problem} from {found.records} records; {described(dataset, found, head, reasons)}; "
        f"{remedy}; {accept}; every rejection is in {listed}"
    )


def described(dataset: DatasetSettings, found: Scan, head: Iterable[Record], reasons: Mapping[str, int]) -> str:
    """Columns, labels and rejections seen beside the mapping in force."""
    columns = ", ".join(f"{name} {count}" for name, count in found.columns.most_common(SHOWN)) or "none"
    seen = labels(head, dataset.columns)
    said = f"labels seen: {', '.join(f'{label} {count}' for label, count in seen.most_common(SHOWN))}; " if seen else ""
    rejections = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])[:SHOWN]) or "none"
    roles = f", roles {flow(dict(dataset.roles))}" if dataset.roles else ""
    mapping = f"expected: format {dataset.format}, columns {flow(dict(dataset.columns))}{roles}"
    return f"columns seen: {columns}; {said}rejected: {rejections}; {mapping}"


def accepting(dataset: DatasetSettings, head: list[Record], reasons: Mapping[str, int]) -> dict[str, Any]:
    """Config entries that would accept what was rejected: roles for unknown labels, the mapping that the columns suggest."""
    unknown = [reason.partition(":")[2] for reason in reasons if reason.startswith("unknown_role:")]
    if unknown:
        return {"roles": {label: likely_role(label) for label in sorted(unknown)}}
    try:
        proposal = detected(head, dataset.name)
    except StageError:
        return {}
    known = {name: column for name, column in dataset.columns.items() if name in proposal["columns"]}
    return {} if (proposal["format"], proposal["columns"]) == (dataset.format, known) else proposal


def likely_role(label: str) -> str:
    """The role that `label` usually has; of a name that is in no table, the answering side, as model names are the common case."""
    return LIKELY_ROLES.get(label.lower(), "assistant")


def flow(value: Any) -> str:
    """`value` as YAML on one line."""
    return str(yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9, allow_unicode=True)).strip()
