"""Uploads of exported directories to a Hugging Face hub, by the hub's own client."""

import stat
from pathlib import Path

from lorad.errors import LoradError, NotAllowed, SpecError

_TOKEN_BYTES = 4096
_LOGIN = "Log in with `hf auth login`, or give --token-file FILE."


def read_token(path: Path | None) -> str | None:
    """Return the token in a file that its owner alone can read; None without a file. Raises SpecError."""
    if path is None:
        return None
    try:
        mode = path.stat().st_mode
        if stat.S_IMODE(mode) & 0o077:
            raise SpecError(f"{path} can be read by others", hint=f"chmod 600 {path}")
        with path.open() as file:
            token = file.read(_TOKEN_BYTES).strip()
    except OSError as error:
        raise SpecError(f"{path}: {error.strerror}", hint="Name a file with the token.") from error
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token:
        raise SpecError(f"{path} holds no token", hint="It is one line that begins with hf_.")
    return token


def push(directory: Path, repository: str, *, private: bool, token: str | None, message: str) -> str:
    """Upload every file of `directory` as one commit, into a repository that is made where there is none.

    Returns the URL of the commit. Raises NotAllowed for a token that may not, LoradError for anything else
    that the hub or the network says; the directory stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, LocalTokenNotFoundError

    hub = HfApi(token=token, library_name="lorad")
    try:
        hub.create_repo(repository, private=private or None, exist_ok=True)
        own = ["manifest.json"]
        done = hub.upload_folder(
            repo_id=repository, folder_path=directory, commit_message=message, ignore_patterns=own
        )
    except HFValidationError as error:
        raise SpecError(f"{repository} is no name of a repository: {error}", hint="Give ORG/NAME.") from error
    except LocalTokenNotFoundError as error:
        raise NotAllowed("the hub wants a token, and there is none", hint=_LOGIN) from error
    except Exception as error:  # each version of the client, and each of its transports, has kinds of its own
        if getattr(getattr(error, "response", None), "status_code", 0) in (401, 403):
            raise NotAllowed(f"the hub does not let you write to {repository}", hint=_LOGIN) from error
        line = " ".join(str(error).split())[:300] or type(error).__name__
        hint = f"Nothing is lost: `hf upload {repository} {directory}` uploads the files."
        raise LoradError(f"{repository} was not uploaded: {line}", hint=hint) from error
    return str(done.commit_url)
