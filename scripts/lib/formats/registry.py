"""The formats by name."""

from scripts.lib.formats import columns, dialogue, messages, sharegpt, transcript, turns
from scripts.lib.formats.record import Format

FORMATS: dict[str, Format] = {
    "messages": messages.FORMAT,
    "sharegpt": sharegpt.FORMAT,
    "columns": columns.FORMAT,
    "dialogue": dialogue.FORMAT,
    "turns": turns.FORMAT,
    "transcript": transcript.FORMAT,
}
