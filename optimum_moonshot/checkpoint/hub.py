"""Download checkpoints from the Hub, and publish a saved one in a single commit."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.hf_api import RepoFile

from ..errors import MoonshotError, Option, Text, reason, require
from ..files import WEIGHT_FILES

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
# Weights in other files than safetensors, and models of other libraries.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "original/*")
_log = logging.getLogger(__name__)
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def local_folder(name_or_path: str | os.PathLike[str], whole: bool = False, **hub: Any) -> Path:
    """The folder of a checkpoint, downloaded from the Hub, with `HUB_OPTIONS`, if it is the name of a repository.

    With `whole`, files that loading does not need are downloaded too, such as the card.
    """
    if os.path.isdir(name_or_path):
        return Path(name_or_path)
    try:
        ignored, allowed = (list(_OTHER_WEIGHTS), None) if whole else (None, list(_FILES))
        return Path(snapshot_download(str(name_or_path), ignore_patterns=ignored, allow_patterns=allowed, **hub))
    except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
        raise MoonshotError(f"{name_or_path} is neither a folder nor a readable repository: {error}") from error


def download_others(
    name: str, wanted: Callable[[str, int], bool], revision: str | None = None, cache_dir: Any = None, **hub: Any
) -> Path | None:
    """The folder in the cache of a repository that a model was loaded from, with `HUB_OPTIONS`; None if there is none.

    The files of the loaded commit of which `wanted(path, bytes)` is true are downloaded. If they cannot be, those in
    the cache have to do, with a log message, so that saving a model does not depend on the network.
    """
    try:
        cached = try_to_load_from_cache(name, "config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:  # a folder that is gone
        return None
    if not isinstance(cached, str):
        return None
    folder = Path(cached).parent
    try:
        if not hub.get("local_files_only"):
            tree = HfApi(token=hub.get("token")).list_repo_tree(name, revision=folder.name, recursive=True)
            names = [escape(file.path) for file in tree if isinstance(file, RepoFile) and wanted(file.path, file.size)]
            snapshot_download(name, revision=folder.name, cache_dir=cache_dir, allow_patterns=names, **hub)
    except (HfHubHTTPError, HTTPError, OSError) as error:
        _log.warning("%s: of its other files, only those in the cache are copied: %s", name, reason(error))
    return folder


def open_repository(
    repo_id: str, *, private: bool | None = None, token: str | bool | None = None, exist_ok: bool = False
) -> str:
    """Create a model repository, which must be empty unless `exist_ok`, and return its full name."""
    require(isinstance(repo_id, str), 'give "user/name"', field="repo_id", value=repo_id)
    with _explained(repo_id):
        api = HfApi(token=token)
        full = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        info = api.model_info(full)
        files = [file.rfilename for file in info.siblings or () if file.rfilename != ".gitattributes"]
        if files and not exist_ok:
            message = f"push_to_hub: {full} exists and holds {len(files)} files, such as {files[0]}"
            hint = Text("{} adds a commit that replaces its weights", Option("exist_ok", True))
            raise MoonshotError(message, hint=hint)
        if private is not None and info.private != private:
            message = f"{full} exists and is {'private' if info.private else 'public'}"
            hint = Text("change that on the Hub, or omit {}", "private")
            raise MoonshotError(message, field="private", value=private, hint=hint)
        return full


def upload(
    folder: str | os.PathLike[str], repo_id: str, *, token: str | bool | None = None, commit_message: str | None = None
) -> str:
    """Upload a folder in one commit, which also deletes weights that the folder does not contain; return its URL."""
    with _explained(repo_id):
        commit = HfApi(token=token).upload_folder(
            repo_id=repo_id,
            folder_path=Path(folder),
            commit_message=commit_message or "Upload a model pruned by optimum-moonshot",
            delete_patterns=list(WEIGHT_FILES),
        )
        return commit.commit_url


@contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """Convert errors of the Hub and of the network to `MoonshotError`, with a hint."""
    try:
        yield
    except LocalTokenNotFoundError as error:
        hint = Text("log in with `hf auth login`, or give {}", "token")
        raise MoonshotError(f"push_to_hub: no token ({error})", hint=hint) from error
    except HFValidationError as error:
        raise MoonshotError(f"push_to_hub: {repo_id!r} is not the name of a repository ({error})") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = error.server_message or str(error).splitlines()[0]
        if status in (401, 403):
            message = f"push_to_hub: the Hub refused the token for {repo_id} ({status}: {answer})"
            hint = Text("log in with `hf auth login`, or give a {} with write access", "token")
            raise MoonshotError(message, hint=hint) from error
        raise MoonshotError(f"push_to_hub: the Hub answered {status} for {repo_id}: {answer}") from error
    except (HTTPError, OSError) as error:
        raise MoonshotError(
            f"push_to_hub: the connection to {constants.ENDPOINT} broke ({error or type(error).__name__}); nothing was "
            f"published in {repo_id}",
            hint="try again",
        ) from error
