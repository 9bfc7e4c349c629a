import os
import sys
from pathlib import Path

from snakemake.utils import min_version

min_version("9.27.1")


# The jobs run the interpreter and the code that Snakemake itself runs from; a prefix is not part of a rule's code.
MODULES = os.pathsep.join(filter(None, [str(workflow.basedir), os.environ.get("PYTHONPATH")]))
shell.prefix(f"set -euo pipefail; export PATH='{Path(sys.executable).parent}':$PATH PYTHONPATH='{MODULES}'; ")


configfile: "config.yaml"


include: "rules/common.smk"
include: "rules/data.smk"
include: "rules/plan.smk"
include: "rules/generate.smk"
include: "rules/calibrate.smk"
include: "rules/tokens.smk"
include: "rules/hidden.smk"
include: "rules/train.smk"
include: "rules/benchmark.smk"
include: "rules/deploy.smk"


rule all:
    """The benchmark table, and everything that it needs."""
    default_target: True
    input:
        f"results/{RUN}/report/benchmark.md",
    localrule: True


onstart:
    record_nothing_of_failed_jobs()


onsuccess:
    logger.info(f"table: results/{RUN}/report/benchmark.md")


onerror:
    logger.error(f"logs: results/{RUN}/logs/ (the last line of the failed stage's log says what to do)")
