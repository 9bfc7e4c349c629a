"""Messages, chat templates and loss spans: from conversations to token rows. Knows ids and structure, never patterns over text."""
