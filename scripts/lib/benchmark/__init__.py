"""One benchmark cell: a task with a drafter against the target alone."""
