"""Stage calibrate: answers a few rows of a dataset and says what all of them will take, in tokens and hours."""

from scripts.lib.calibrating.calibrating import calibrate
from scripts.lib.ground.stage import stage_command

if __name__ == "__main__":
    stage_command("calibrate", __doc__, calibrate, inputs=("prepared", "target"))
