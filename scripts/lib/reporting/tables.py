"""The tables and figures about speed: what each shows, for the page and for Markdown."""

from collections.abc import Sequence

from scripts.lib.reporting.outlook import Setting
from scripts.lib.reporting.table import Table, number
from scripts.lib.reporting.verdict import Check, Verdict

SETTING_HINTS = {
    "drafter": "the drafter, with how it is served where the run has several ways",
    "concurrency": "requests at a time",
    "draft steps": "drafts one after the other; a chain checks one token more",
    "speed-up": "mean over tasks with its 95 % interval",
    "accept length": "mean over tasks",
    "break-even": "the accept length from which on it pays; mean over tasks",
    "basis": "measured; expected by the cost model; or bounded by the shortest chain measured and the target alone",
}
CHECK_HINTS = {
    "drafter": "the drafter, with how it is served where the run has several ways",
    "concurrency": "requests at a time",
    "task": "what is asked",
    "draft steps": "the setting that was left out of the fit",
    "expected accept length": "from the next longer chain, cut short",
    "accept length": "measured",
    "expected speed-up": "from the other lengths, with its 95 % interval or its bounds",
    "speed-up": "measured",
    "agrees": "do the two differ by no more than their intervals allow?",
}


def settings_table(verdicts: Sequence[Verdict]) -> Table:
    """Every chain that the cells let judge."""
    rows = [setting_row(verdict, setting) for verdict in verdicts for setting in verdict.settings]
    return Table(list(SETTING_HINTS), rows, ("drafter", "basis"))


def setting_row(verdict: Verdict, setting: Setting) -> list[str]:
    """One chain."""
    family = verdict.family
    figures = (setting.speedup.words(), number(setting.accept_length, 2), number(setting.break_even, 2))
    return [family.name, str(family.concurrency), str(setting.steps), *figures, setting.basis]


def best_classes(verdicts: Sequence[Verdict]) -> list[str]:
    """The class of each row of `settings_table`: the best of its family stands out."""
    return ["best" if setting is verdict.best else "other" for verdict in verdicts for setting in verdict.settings]


def checks_table(checks: Sequence[Check]) -> Table:
    """Measured chains beside what the others of their family let expect."""
    rows = [
        [
            check.family.name,
            str(check.family.concurrency),
            check.task,
            str(check.steps),
            number(check.expected.accept_length.value, 2),
            number(check.measured.accept_length.value, 2),
            check.expected.speedup.words(),
            check.measured.speedup.words(),
            "yes" if check.agrees else "no",
        ]
        for check in checks
    ]
    return Table(list(CHECK_HINTS), rows, ("drafter", "task", "agrees"))
