"""Stage generate: the target writes the assistant turns of the prepared rows, batch by batch, and resumes where it was killed."""

from scripts.lib.generation.build import generate
from scripts.lib.ground.stage import stage_command

if __name__ == "__main__":
    stage_command("generate", __doc__, generate, inputs=("prepared", "target"))
