"""Publish a saved checkpoint on the Hub: everything in one commit, or nothing."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError

from ..errors import MoonshotError, require
from ..files import WEIGHT_FILES


def open_repository(
    repo_id: str, *, private: bool | None = None, token: str | bool | None = None, exist_ok: bool = False
) -> str:
    """Make a model repository; one that exists must be empty, or be asked for.

    Args:
        repo_id: "user/name", or a name of your own.
        private: whether a new repository is; None is the account's default.
        token: of the Hub; None is the one that is logged in.
        exist_ok: add a commit to a repository that holds files already.

    Returns:
        The full name.

    Raises:
        MoonshotError: the token is refused, the repository holds files or is private where it should be public (or the
            other way), or the Hub cannot be reached.
    """
    require(isinstance(repo_id, str), f'push_to_hub: repo_id={repo_id!r}: give "user/name"')
    with _explained(repo_id):
        api = HfApi(token=token)
        full = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        found = api.model_info(full)
        held = [file.rfilename for file in found.siblings if file.rfilename != ".gitattributes"]
        require(
            exist_ok or not held,
            f"push_to_hub: {full} exists and holds {len(held)} files, such as {(held or [''])[0]}; exist_ok=True adds "
            "a commit that replaces its weights",
        )
        require(
            private is None or found.private == private,
            f"push_to_hub: private={private}, but {full} exists and is {'private' if found.private else 'public'}; "
            "change that on the Hub, or leave private out",
        )
        return full


def upload(
    folder: str | os.PathLike[str], repo_id: str, *, token: str | bool | None = None, commit_message: str | None = None
) -> str:
    """Upload a folder to a repository in one commit, which also removes weights that the folder does not hold.

    Args:
        folder: of a saved model.
        repo_id: of `open_repository`.
        token: of the Hub; None is the one that is logged in.
        commit_message: None says what package has pruned the model.

    Returns:
        The address of the commit.

    Raises:
        MoonshotError: the token is refused, or the connection broke; nothing is published then.
    """
    with _explained(repo_id):
        commit = HfApi(token=token).upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message or "Upload a model pruned by optimum-moonshot",
            delete_patterns=list(WEIGHT_FILES),
        )
        return commit.commit_url


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Errors of the Hub and of the network as one that says what to do."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        raise MoonshotError(f"push_to_hub: no token; log in with `hf auth login`, or give token= ({error})") from error
    except HFValidationError as error:
        raise MoonshotError(f"push_to_hub: {repo_id!r} is no name of a repository ({error})") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        said = error.server_message or str(error).splitlines()[0]
        if status in (401, 403):
            raise MoonshotError(
                f"push_to_hub: the Hub refused the token for {repo_id} ({status}: {said}); log in with "
                "`hf auth login`, or give a token= that may write there"
            ) from error
        raise MoonshotError(f"push_to_hub: the Hub answered {status} for {repo_id}: {said}") from error
    except (HTTPError, OSError) as error:
        raise MoonshotError(
            f"push_to_hub: the connection to {constants.ENDPOINT} broke ({error or type(error).__name__}); nothing was "
            f"published in {repo_id}, call it again"
        ) from error
