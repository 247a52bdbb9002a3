"""Download checkpoints from the Hub, and publish a saved one in a single commit."""

import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, constants, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.hf_api import RepoFile
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file
from transformers.utils.peft_utils import find_adapter_config_file

from ..errors import MoonshotError, reason, require
from ..files import WEIGHT_FILES

HUB_OPTIONS = ("revision", "token", "cache_dir", "local_files_only")
FILE_OPTIONS = (*HUB_OPTIONS, "force_download", "proxies", "subfolder")  # where a file is, and how it is downloaded
CHECKPOINT_OPTIONS = (*FILE_OPTIONS, "trust_remote_code", "code_revision", "gguf_file")  # of all parts of a checkpoint
_HUB_NAME = re.compile(r"(?:hf://)?([^/@\s]+/[^/@\s]+)(?:@([^/\s]+))?(?:/(.+\.gguf))?")
# Weights in other files than safetensors, and models of other libraries.
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "original/*")
_FILES = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")
_log = logging.getLogger(__name__)


def find_checkpoint(name_or_path: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The name or folder of a checkpoint for `from_pretrained` of transformers, and its options.

    A GGUF file ("model.gguf", "owner/repo/model.gguf", "hf://owner/repo@revision/model.gguf", or an option) becomes the
    folder that it is downloaded to, and `gguf_file`; the default dtype is bfloat16.

    Raises:
        OSError: there is no such file.
    """
    name, options, file = os.fspath(name_or_path), dict(options), options.get("gguf_file")
    hub = _hub_name(name)
    if hub is not None:
        name, revision, hub_file = hub.groups()
        file = file or hub_file
        options |= {} if revision is None else {"revision": revision}
    elif file is None and name.endswith(".gguf"):
        name, file = os.path.split(os.path.abspath(name))
    if file is None:
        return name, options
    path: Any = cached_file(name, file, **{key: options.pop(key) for key in FILE_OPTIONS if key in options})
    folder, file = os.path.split(path)
    dtype = options.get("dtype", options.get("torch_dtype"))
    dtype = {"dtype": torch.bfloat16} if dtype in (None, "auto") else {}
    return folder, {**options, "gguf_file": file, **dtype}


def repository(name_or_path: Any) -> str:
    """The repository of a file on the Hub; any other name is returned unchanged."""
    hub = _hub_name(os.fspath(name_or_path))
    return os.fspath(name_or_path) if hub is None else hub[1]


def _hub_name(name: str) -> "re.Match[str] | None":
    """The repository, the revision and the GGUF file of a name on the Hub with an owner; None for other names."""
    return None if os.path.exists(name) else _HUB_NAME.fullmatch(name)


def local_folder(name_or_path: str | os.PathLike[str], whole: bool = False, **hub: Any) -> Path:
    """The folder of a checkpoint, downloaded from the Hub, with `HUB_OPTIONS`, if it is the name of a repository.

    With `whole`, files that loading does not need are downloaded too, such as the card.
    """
    folder = Path(name_or_path)
    if not os.path.isdir(name_or_path):
        try:
            ignored, allowed = (list(_OTHER_WEIGHTS), None) if whole else (None, list(_FILES))
            folder = Path(snapshot_download(str(name_or_path), ignore_patterns=ignored, allow_patterns=allowed, **hub))
        except (HfHubHTTPError, HFValidationError, HTTPError, OSError) as error:
            raise MoonshotError(f"{name_or_path} is neither a folder nor a readable repository: {error}") from error
    if not (folder / CONFIG_NAME).is_file():
        refuse_adapter(name_or_path, folder)
    return folder


def refuse_adapter(name_or_path: str | os.PathLike[str], folder: str | os.PathLike[str], **hub: Any) -> None:
    """Raise `MoonshotError` if a folder (or repository, with `HUB_OPTIONS`) without a model contains a PEFT adapter.

    `name_or_path` is the user's name for it.
    """
    try:
        file = find_adapter_config_file(os.fspath(folder), **hub)
        base = None if file is None else json.loads(Path(file).read_text(encoding="utf-8"))["base_model_name_or_path"]
    except Exception:  # the caller's error about the missing model is clearer
        return
    if file is not None:
        message = f"{name_or_path} is a PEFT adapter of {base}, not a model"
        merge = "AutoPeftModelForCausalLM.from_pretrained(…).merge_and_unload().save_pretrained(folder)"
        hint = f"merge the two, and give the result: {merge}"
        raise MoonshotError(message, hint=hint)


def download_others(
    name: Any,
    wanted: Callable[[str, int], bool],
    subfolder: str = "",
    revision: str | None = None,
    cache_dir: Any = None,
    **hub: Any,
) -> Path | None:
    """The folder in the cache of a repository that a model was loaded from, with `HUB_OPTIONS`; None if there is none.

    The files of the loaded commit and subfolder for which `wanted(path, bytes)` is true, with paths in the subfolder,
    are downloaded. If that fails, a log message says that only the cached ones are used, so that saving a model does
    not depend on the network.
    """
    top = f"{subfolder.strip('/')}/" if subfolder else ""
    try:
        cached = try_to_load_from_cache(name, f"{top}config.json", cache_dir=cache_dir, revision=revision)
    except HFValidationError:  # a folder that no longer exists
        return None
    if not isinstance(cached, str):
        return None
    folder = Path(cached).parent
    commit = folder.parents[top.count("/") - 1].name if top else folder.name
    try:
        if not hub.get("local_files_only"):
            tree = HfApi(token=hub.get("token")).list_repo_tree(name, top or None, revision=commit, recursive=True)
            files = [file for file in tree if isinstance(file, RepoFile)]
            names = [escape(file.path) for file in files if wanted(file.path.removeprefix(top), file.size)]
            snapshot_download(name, revision=commit, cache_dir=cache_dir, allow_patterns=names, **hub)
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
            message = f"push_to_hub: {full} exists and contains {len(files)} files, such as {files[0]}"
            hint = "exist_ok=True adds a commit that replaces its weights"
            raise MoonshotError(message, hint=hint)
        if private is not None and info.private != private:
            message = f"{full} exists and is {'private' if info.private else 'public'}"
            hint = "change that on the Hub, or omit `private`"
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
        hint = "log in with `hf auth login`, or give `token`"
        raise MoonshotError(f"push_to_hub: no token ({error})", hint=hint) from error
    except HFValidationError as error:
        raise MoonshotError(f"push_to_hub: {repo_id!r} is not the name of a repository ({error})") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        answer = error.server_message or str(error).splitlines()[0]
        if status in (401, 403):
            message = f"push_to_hub: the Hub refused the token for {repo_id} ({status}: {answer})"
            hint = "log in with `hf auth login`, or give a `token` with write access"
            raise MoonshotError(message, hint=hint) from error
        raise MoonshotError(f"push_to_hub: the Hub answered {status} for {repo_id}: {answer}") from error
    except (HTTPError, OSError) as error:
        raise MoonshotError(
            f"push_to_hub: the connection to {constants.ENDPOINT} failed ({error or type(error).__name__}); nothing "
            f"was published in {repo_id}",
            hint="try again",
        ) from error
