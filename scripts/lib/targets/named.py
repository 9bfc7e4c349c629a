"""What tells one target from another, for whoever writes down what was captured from it or measured on it."""

from typing import Any

from scripts.lib.ground.manifest import Manifest

FACTS = ("source", "revision", "version", "member", "wheel_sha256", "chat_template_sha256")


def named(target: Manifest) -> dict[str, Any]:
    """Where the target of this manifest comes from, at which revision, and with which template, as far as its source has them."""
    return {name: target.facts[name] for name in FACTS if name in target.facts}
