"""What the doctor says."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.lib.ground.errors import StageError

IDLE_ACCEPT_LENGTH = 1.05  # under it a drafter does nothing


@dataclass(frozen=True)
class Finding:
    """One misconfiguration by its name of `docs/doctor.md`: what shows it, and what repairs it.

    A `fatal` one would make every figure that is measured wrong; another one is only worth knowing.
    """

    name: str
    evidence: str
    repair: str
    fatal: bool = True


def refuse(findings: Sequence[Finding], where: str) -> None:
    """StageError that names every fatal one of `findings`, when there is one; `where` is the drafter or server that has them."""
    fatal = [finding for finding in findings if finding.fatal]
    if fatal:
        told = "; ".join(f"{finding.name}: {finding.evidence}, so {finding.repair}" for finding in fatal)
        raise StageError(f"{where}: {told}")
