"""Shows all stages at work below results/: a live table here, and a page with curves for the browser.

python -m scripts.monitor [--run RUN] [--port 8400] [--once]
"""

from scripts.lib.ground.stage import guarded
from scripts.lib.watching.monitoring import monitor

if __name__ == "__main__":
    guarded("monitor", lambda: monitor(__doc__))
