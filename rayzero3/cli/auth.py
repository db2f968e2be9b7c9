"""Auth: which token this process shows to a cluster. Decided before Ray is imported, which reads the environment once.

A token belongs to one cluster: ours is shown only to the head that we started. For any other address the user's own variables count
(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH), else the file where Ray itself keeps one. Nothing is written outside our state folder.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import click

from rayzero3.errors import ClusterError

VARIABLES = "RAY_AUTH_TOKEN_PATH (a file) or RAY_AUTH_TOKEN"
"""What a user sets to be let in."""


def state_folder() -> Path:
    """Our own folder, readable by its owner alone: $RAYZERO3_HOME, else where the system keeps the settings of programs."""
    folder = Path(os.environ.get("RAYZERO3_HOME") or click.get_app_dir("rayzero3")).expanduser().absolute()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)
    return folder


def token_file() -> Path:
    """Our token's file, mode 0600; made with a fresh token if it is not there."""
    path = state_folder() / "token"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return path
    with open(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(32))
    return path


def use(own_head: bool) -> None:
    """Set Ray's variables for this process and its children. The user's own settings win.

    Args:
        own_head: Whether the cluster is the head that we start.

    Raises:
        ClusterError: the user's RAY_AUTH_TOKEN_PATH can't be read. (Ray would abort the process.)
    """
    if own_head:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        if _wanted() and not _given():
            os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file())
    elif _given() or (Path.home() / ".ray" / "auth_token").is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    if _wanted() and path and not os.environ.get("RAY_AUTH_TOKEN"):
        try:
            found = Path(path).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            found = ""
        if not found:
            raise ClusterError(
                "unauthorised: RAY_AUTH_TOKEN_PATH", path, "expected a readable file that holds the cluster's token", "Mend or unset it."
            )


def token_hint() -> str | None:
    """Where the token is that the dashboard asks for, in words; None where it asks for none. Never the token itself."""
    if not _wanted():
        return None
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "the token is the value of RAY_AUTH_TOKEN"
    return f"the token is in {os.environ.get('RAY_AUTH_TOKEN_PATH') or Path.home() / '.ray' / 'auth_token'}"


def _wanted() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _given() -> bool:
    return bool(os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"))
