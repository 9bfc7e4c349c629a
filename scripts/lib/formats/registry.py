"""The formats by name."""

from scripts.lib.formats import columns, dialogue, messages, sharegpt, trajectory, transcript, turns
from scripts.lib.formats.record import Format

FORMATS: dict[str, Format] = {
    "messages": messages.FORMAT,
    "sharegpt": sharegpt.FORMAT,
    "columns": columns.FORMAT,
    "dialogue": dialogue.FORMAT,
    "turns": turns.FORMAT,
    "trajectory": trajectory.FORMAT,
    "transcript": transcript.FORMAT,
}
DETECT = "detect"  # stands for the format that the columns of the records suggest
