"""`python -m scripts.doctor`: what is wrong with a drafter, with a command line, and with a server that runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.lib.chat.template import ChatTemplate
from scripts.lib.doctor.findings import Finding
from scripts.lib.doctor.flags import EAGLE_NAMES, STEPS, TOKENS, TOPK, algorithm_of, eagle3, parsed
from scripts.lib.doctor.preflight import preflight, read_config
from scripts.lib.doctor.served import after_start, canary, ceiling_of
from scripts.lib.doctor.walking import questions, walk_findings
from scripts.lib.ground.errors import StageError


@dataclass(frozen=True)
class Case:
    """What to look at: a target and its drafter, the flags that would serve them, a server if it runs, and where and along what to walk."""

    target: Path
    drafter: Path | None
    algorithm: str | None
    flags: Sequence[str]
    training: Path | None = None
    url: str | None = None
    device: str | None = None
    rows: Path | None = None


def case_of(target: Path | None, drafter: Path | None, command: Sequence[str]) -> tuple[Path, Path | None, str | None, list[str]]:
    """Target, drafter, meant algorithm and flags of a server's `command` line, where `target` and `drafter` are given or among its flags.

    A drafter without an algorithm, or an EAGLE-3 drafter with EAGLE, means EAGLE3. StageError without a target.
    """
    given = parsed(command)
    found = target or (Path(given["model-path"]) if given.get("model-path") else None)
    if found is None:
        raise StageError("no target: give --target, or a command line with --model-path")
    path = given.get("speculative-draft-model-path")
    draft = drafter or (Path(path) if path else None)
    algorithm = algorithm_of(given)
    if draft is not None and (algorithm is None or (algorithm in EAGLE_NAMES and eagle3(read_config(draft)))):
        algorithm = "EAGLE3"
    return found, draft, algorithm, list(command)


def examine(case: Case) -> list[Finding]:
    """All findings, the cheapest first; a drafter whose files are wrong is neither walked nor asked."""
    flags = case.flags or usual_flags(case)
    found = preflight(case.target, case.drafter, case.algorithm, flags, case.training)
    if any(finding.fatal for finding in found):
        return found
    prompts = questions(ChatTemplate.load(case.target))
    if case.device is not None and case.drafter is not None and case.algorithm == "EAGLE3":
        found += walk_findings(case.target, case.drafter, case.rows or prompts, case.device)
    if case.url is not None:
        found += after_start(case.url, case.target, case.drafter, case.algorithm, case.flags)
        if case.algorithm is not None and not any(finding.fatal for finding in found):
            found += canary(case.url, prompts, ceiling_of(case.url))
    return found


def usual_flags(case: Case) -> list[str]:
    """The flags that serve the drafter as the design measures it, for a check without a command line."""
    if case.drafter is None or case.algorithm is None:
        return []
    options = {
        "speculative-algorithm": case.algorithm,
        "speculative-draft-model-path": str(case.drafter),
        STEPS: "3",
        TOPK: "1",
        TOKENS: "4",
    }
    return [word for name, value in options.items() for word in (f"--{name}", value)]


def table(findings: Sequence[Finding]) -> str:
    """The findings as text, the fatal ones first."""
    if not findings:
        return "sound: no known misconfiguration"
    lines: list[str] = []
    for found in sorted(findings, key=lambda found: not found.fatal):
        lines += [f"{'FATAL' if found.fatal else 'note'}  {found.name}", f"    evidence  {found.evidence}", f"    repair    {found.repair}"]
    return "\n".join(lines)
