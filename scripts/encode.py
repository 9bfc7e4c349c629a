"""Stage `encode`: turn the conversations of one dataset into token rows with the spans that the target generated."""

from scripts.lib.chat.encode import encode
from scripts.lib.ground.stage import stage_command

if __name__ == "__main__":
    stage_command("encode", __doc__, encode, inputs=("rows", "target"))
