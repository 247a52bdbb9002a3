"""Save pruned and rotated models atomically, or publish them, with their report and model card.

The first of several processes saves; the others wait.
"""

import inspect
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError
from torch import Tensor, nn

from ..distributed.sharing import on_main_process
from ..errors import MoonshotError, check_choice, check_path, reason, require
from ..files import WEIGHT_FILES, replace_file, staged
from ..model.offload import check_not_source
from ..model.weights import is_offloaded
from ..reports.prune_report import PruneReport
from ..reports.record import PruningRecord
from .card import Facts, render_unpruned, write_card
from .compressed_tensors import export_files, quantized_grids
from .in_memory import is_packed, to_save
from .measuring import declared_as_measured
from .origin import Origin, SavedReport, clear_prediction_layers, copy_weights
from .packed_files import FORMATS, check_reloads, pack_files, save_streamed, shard_bytes
from .weight_files import EXPORT


@dataclass(frozen=True)
class Saving:
    """A model to save with its tokenizer or processor, report and card.

    A plain module, which must be pruned, is saved as model.safetensors, without a card. The default format is the one
    in memory; a model that is only rotated is dense. Weights that exist only in the files of the `origin` are copied.
    Report and configuration describe the current weights, with a note if training has changed them. `options` are for
    the model's `save_pretrained`.
    """

    model: nn.Module
    processors: Iterable[Any]
    report: SavedReport
    format: str | None
    origin: Origin
    options: dict[str, Any]

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write a folder, where the files appear all at once; the first of several processes writes.

        `MoonshotError` if the folder cannot be written, or a layer is no longer n:m.
        """
        on_main_process(lambda: self._save(directory, None))

    def publish(self, repo_id: str, commit_message: str | None, token: str | bool | None, **repository: Any) -> str:
        """Upload the files to the Hub in one commit, and return its URL; `repository`: see `open_repository`."""
        self._check_format()

        def upload_model() -> str:
            full = open_repository(repo_id, token=token, **repository)
            with tempfile.TemporaryDirectory() as folder:
                self._save(folder, full)
                return upload(folder, full, token=token, commit_message=commit_message)

        return on_main_process(upload_model)

    def _save(self, directory: str | os.PathLike[str], name: str | None) -> None:
        """Save in this process; the title of the card is `name`, by default the folder's name."""
        model, report, format = self.model, self.report, self._check_format()
        plain = not hasattr(model, "save_pretrained")
        if not isinstance(report, PruneReport):
            require(not plain, f"{type(model).__name__} is not a PreTrainedModel", hint="save its state_dict")
        check_path("directory", directory)
        check_not_source(model, directory, "directory")
        with ExitStack() as stack:
            staging = stack.enter_context(staged("directory", directory))
            stack.enter_context(to_save(model))
            if isinstance(report, PruneReport) and not plain:
                report = stack.enter_context(declared_as_measured(model, report, grids=format == "dense"))
            if plain:
                safetensors.torch.save_model(model, str(staging / "model.safetensors"))
            else:
                _write_model(model, staging, format, self.origin, report, **self.options)
            _save_processors(self.processors, staging)
            report.save(staging)
            name = name or Path(directory).resolve().name
            if not isinstance(report, PruneReport):
                replace_file(staging / "README.md", str(render_unpruned(model, report, name)))
            elif not plain:
                write_card(staging, report, Facts.gather(model, name, format))

    def _check_format(self) -> str:
        """Check the options, and return the format."""
        model, format = self.model, self.format
        if not isinstance(self.report, PruneReport) and PruningRecord.of(model) is None:
            message = "the model has no zeros to pack; prune it first"
            require(format in (None, "dense"), message, field="format", value=format)
            format = "dense"
        format = format or ("packed" if is_packed(model) else "dense")
        check_choice("format", format, (*FORMATS, EXPORT))
        plain = not hasattr(model, "save_pretrained")
        message = f"{type(model).__name__} is not a PreTrainedModel"
        require(not plain or format == "dense", message, field="format", value=format, hint='use "dense"')
        if format == EXPORT:
            with to_save(model):
                quantized_grids(model)
        _check_options(type(model), self.options, format)
        return format


def _check_options(cls: Any, options: Mapping[str, Any], format: str) -> None:
    """Check the options for `save_pretrained` of a class, which a plain module does not have."""
    supported = inspect.signature(cls.save_pretrained).parameters if hasattr(cls, "save_pretrained") else ()
    for name, value in options.items():
        require(name != "push_to_hub", "call the pruner's push_to_hub, which also writes the card", field=name)
        require(name != "is_main_process", "call it in one process, which writes everything", field=name)
        require(name in supported, f"{cls.__name__}.save_pretrained has no such option", field=name, value=value)
        if name == "max_shard_size":
            shard_bytes(value)
        tensors = isinstance(value, Mapping) and all(isinstance(weight, Tensor) for weight in value.values())
        weights = name != "state_dict" or value is None or tensors
        require(weights, "give the weights by their names", field=name, value=value)
        suffix = name != "variant" or value is None or (isinstance(value, str) and Path(value).name == value)
        require(suffix, 'give a name such as "fp16"', field=name, value=value)
        without = name != "variant" or format == "dense"
        require(without, "a packed checkpoint has no variants", field=name, value=value)


def _write_model(model: Any, folder: Path, format: str, origin: Origin, report: SavedReport, **options: Any) -> None:
    """Save the configuration and the weights of a `PreTrainedModel`, which may be offloaded."""
    unloaded = origin.to_copy(model, report, options.get("variant"))
    streamed = is_offloaded(model)
    try:
        if streamed:
            save_streamed(model, folder, format == "packed", unloaded, **options)
        else:
            model.save_pretrained(folder, **options)
    except RuntimeError as error:
        if "shared tensors" not in str(error):
            raise
        message = f"it shares weights that its class does not declare as tied: {reason(error)}"
        hint = "give each module a copy of its weight: module.weight = torch.nn.Parameter(module.weight.clone())"
        raise MoonshotError(message, field="model", hint=hint) from error
    except ValueError as error:
        if "GenerationConfig is invalid" not in str(error):
            raise
        why = "; ".join(line[2:] for line in str(error).splitlines() if line.startswith("- ")) or reason(error)
        hint = "change it, such as model.generation_config.temperature = None, and save again"
        raise MoonshotError(why, field="generation_config", hint=hint) from error
    if not streamed:
        copy_weights(unloaded, folder)
        if format == "packed":
            pack_files(folder, folder, model)
    if origin.unloaded and not unloaded:
        clear_prediction_layers(folder)
    check_reloads(model, folder)
    if format == EXPORT:
        export_files(folder, folder, model)


def _save_processors(processors: Iterable[Any], folder: Path) -> None:
    """Save tokenizer and image processor; errors of the tokenizers library, a plain `Exception`, become `OSError`."""
    for processor in processors:
        try:
            if hasattr(processor, "save_pretrained"):
                processor.save_pretrained(folder)
        except Exception as error:
            if type(error) is not Exception:
                raise
            raise OSError(reason(error)) from error


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
