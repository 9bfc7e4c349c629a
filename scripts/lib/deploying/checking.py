"""Does a running server serve a deployed drafter as it was trained?"""

import json
import logging
from pathlib import Path
from typing import Any

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.deploying.serving import TRAINING
from scripts.lib.doctor.findings import Finding, refuse
from scripts.lib.doctor.preflight import preflight
from scripts.lib.doctor.served import after_start, canary
from scripts.lib.doctor.walking import questions
from scripts.lib.ground.errors import StageError

log = logging.getLogger("aerie")


def check_served(url: str, drafter: Path, target: Path | None) -> None:
    """Ask the server at `url`, which should run `drafter` (a folder of stage deploy) with its `target`.

    Checked are the files, what the server says of model, algorithm, flags and template, and that it accepts drafts on a few prompts.
    Raises StageError that names everything wrong, with its repair.
    """
    wanted = read_wanted(drafter)
    folder = target or drafter / wanted["target"]
    if not (folder / "config.json").exists():
        raise StageError(f"{folder}: no target there; give its folder with --target")
    algorithm, flags = wanted["algorithm"], [*wanted["flags"], "--speculative-draft-model-path", str(drafter)]
    findings = [*preflight(folder, drafter, algorithm, flags, drafter / TRAINING), *after_start(url, folder, drafter, algorithm, flags)]
    refuse(told(findings), url)
    refuse(told(canary(url, questions(ChatTemplate.load(folder)), wanted["ceiling"])), url)
    log.info("%s: serves %s with %s as it was trained", url, folder.resolve().name, drafter)


def read_wanted(drafter: Path) -> dict[str, Any]:
    """`served.json` of a deployed drafter."""
    path = drafter / "served.json"
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        raise StageError(f"{path}: not readable ({error}); give a folder that stage deploy made") from error


def told(findings: list[Finding]) -> list[Finding]:
    """The same findings; those that are no fault are logged, as nobody else tells them."""
    for finding in findings:
        if not finding.fatal:
            log.warning("%s: %s; %s", finding.name, finding.evidence, finding.repair)
    return findings
