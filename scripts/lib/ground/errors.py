"""The one exception that a user is meant to read."""


class StageError(Exception):
    """A stage cannot go on: one sentence that names the file, the value, the limit and the remedy.

    It becomes the last line of the stage's log, without a traceback.
    """
