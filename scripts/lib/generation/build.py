"""Stage generate: prepared rows to answers of the target."""

from pathlib import Path

from scripts.lib.generation.settings import GenerateSettings
from scripts.lib.ground.stage import Job, Result


def generate(job: Job, folder: Path) -> Result:
    """Let the target write the turns that the settings ask for; one row out per turn, or one in `failed.parquet`.

    Raises StageError when no turn at all got an answer.
    """
    settings = GenerateSettings.of(job.settings)
    # Only the chosen engine is imported: torch and the target's model take seconds, and servers need neither.
    if settings.engine == "sglang":
        from scripts.lib.generation.served import generate_served

        return generate_served(job, settings, folder)
    from scripts.lib.generation.responses import generate_in_process

    return generate_in_process(job, settings, folder)
