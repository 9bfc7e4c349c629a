"""Make the folder of the fastest drafter: its files, how to serve it, what it was made of, and a check of its server."""

from scripts.lib.deploying.build import deploy
from scripts.lib.ground.stage import stage_command
from scripts.lib.reporting.build import INPUTS

if __name__ == "__main__":
    stage_command("deploy", __doc__, deploy, inputs=INPUTS)
