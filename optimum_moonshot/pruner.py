"""`MoonshotPruner`, what a user calls: load → prune → save."""

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel

from .checkpoint.file_integrity import check_complete
from .checkpoint.hub import open_repository, upload
from .checkpoint.in_memory import is_packed, to_runtime
from .checkpoint.meta_model import PLACES, folder_of_its_model, meta_device_model, model_class, offload_options
from .checkpoint.saving import check_saving, save_model
from .config import MoonshotConfig, memory_size
from .data.batches import Batch
from .distributed.ranks import SINGLE_PROCESS, Ranks, on_main_process, processes
from .errors import MoonshotError, check_choice, check_path, require
from .functional import check_ranked
from .model.calls import Forward, called_by
from .model.compaction import Compaction, compact_model
from .model.layers import rest_onloaded
from .model.model_info import load_processor, load_tokenizer
from .model.offload import write_to
from .objective.patterns import Experts
from .pipeline.selection import Subject
from .planning.build_spec import Room
from .planning.plan import make_plan
from .reports.plan import Plan
from .reports.prune_report import PruneReport
from .reports.record import PruningRecord
from .reports.rotation_report import RotationReport
from .reports.seeds import SweepEntry
from .reports.sweep_report import SweepReport
from .results.run_folder import RunFolder
from .results.store import ResultStore
from .runs.prune import prune_model
from .runs.rotate import run_rotation
from .runs.sparsity_path import SparsityPath, prune_path
from .runs.sweep import Sweep, sweep, variants

_INFERENCE_MODE = "torch.inference_mode() forbids gradients: prune outside of it"
_NO_SWEEP = "no sweep to choose from: call pruner.sweep(calibration) first"
_PACKED = 'the model is packed in memory: call pruner.to_runtime("dense") first'
_NOT_PRUNED = "the model is not pruned yet: call pruner.prune(calibration) first"


class MoonshotPruner:
    """Prunes a model in one shot, in place.

    ```python
    config = MoonshotConfig(solver="sparsegpt", pattern="2:4", lam=0.9)
    pruner = MoonshotPruner.from_pretrained("meta-llama/Llama-3.2-1B", config)
    report = pruner.prune("c4")
    pruner.save_pretrained("Llama-3.2-1B-2of4")
    ```

    Args:
        model: a `PreTrainedModel`, on any device. It changes only when every layer has its result: a run that fails or
            is interrupted leaves it as it was. One that was pruned while it was loaded can be saved and published at
            once, with its report and card.
        config: what to do.
        tokenizer: for calibration on text; saved with the model.
        processor: the image processor, for calibration on images; saved with the model. For a plain module, a function
            from an image to its tensor [C, H, W] will do.

    Raises:
        MoonshotError: another type of model or configuration.
    """

    def __init__(self, model: nn.Module, config: MoonshotConfig, tokenizer: Any = None, processor: Any = None):
        require(isinstance(model, nn.Module), f"model is a {type(model).__name__}: give a PreTrainedModel")
        require(isinstance(config, MoonshotConfig), f"config is a {type(config).__name__}: give a MoonshotConfig")
        self.model, self.config, self.tokenizer, self.processor = model, config, tokenizer, processor
        self.report: PruneReport | None = getattr(
            model, "moonshot_report", None
        )  # of a model pruned while it was loaded
        self.rotation: RotationReport | None = None  # of `rotate`
        self._sweep: Sweep | None = None
        self._unsaved: list[ResultStore | RunFolder] = []  # whose files go once the model is saved

    def __repr__(self) -> str:
        """The model's class and size, and what differs from the default configuration."""
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{type(self).__name__}({type(self.model).__name__}, {count:,} parameters, {self.config!r})"

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        config: MoonshotConfig,
        offload: str | None = None,
        **model_kwargs: Any,
    ) -> "MoonshotPruner":
        """Load a model, as the class that its configuration names, with its tokenizer and image processor if any.

        Args:
            name_or_path: a Hub repository or a local folder.
            config: what to do.
            offload: "disk" leaves the weights of the decoder layers in the checkpoint's files, "cpu" puts them in host
                memory; one layer at a time is on the device, which `device_map` may name. None loads the whole model.
            model_kwargs: for the model's `from_pretrained`, such as `dtype`, `device_map`, `revision`, `token`.

        Raises:
            MoonshotError: the checkpoint lacks weights of the model, which would be random numbers; or it is damaged or
                quantized, and cannot be loaded.
            OSError: there is no such model.
        """
        shared: dict[str, Any] = {
            key: model_kwargs[key] for key in ("revision", "token", "trust_remote_code") if key in model_kwargs
        }
        check_path("name_or_path", name_or_path)
        require(isinstance(config, MoonshotConfig), f"config is a {type(config).__name__}: give a MoonshotConfig")
        message = "from_pretrained returns a pruner"
        require("output_loading_info" not in model_kwargs, message, field="output_loading_info")
        model, info = _load(name_or_path, shared, model_kwargs, offload, config.offload_dir)
        check_complete(info["missing_keys"], (), info["mismatched_keys"])
        return cls(model, config, load_tokenizer(name_or_path, **shared), load_processor(model, name_or_path, **shared))

    def _subject(self, loss: Callable[[Any, Batch], Tensor] | None, progress: bool, ranks: Ranks) -> Subject:
        require(loss is None or callable(loss), "give a function of output and inputs", field="loss", value=loss)
        require(not is_packed(self.model), _PACKED)
        write_to(self.model, self.config.offload_dir)
        return Subject(self.model, self.tokenizer, self.processor, loss, progress and ranks.is_main, ranks)

    def prune(
        self,
        calibration: Any = None,
        *,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        resume_dir: str | os.PathLike[str] | None = None,
    ) -> PruneReport:
        """Prune the model in place; with pattern="experts" it becomes a smaller one in place.

        Where `torch.distributed` has a group of several processes, all of them call this together: each has some of the
        samples and solves some of the layers, and all end with the same model, that of one process.

        Args:
            calibration: "c4", "wikitext2", "ptb", a path to text, JSON (lines) or Parquet, a list of strings, a
                `datasets.Dataset`, or an iterable of model inputs: dictionaries, or pairs of inputs and labels. For an
                image model a folder with a sub-folder of images per class, Parquet, a Hub name or a `Dataset` with a
                column of images. "self" or a `SelfCalibration`: text that the dense model writes first. None is
                `config.calibration`. Magnitude pruning does without data; given some, it
                reports losses.
            loss: (model output, inputs) → [B] losses, in place of the cross-entropy that the Fisher loss starts from.
            forward: (model, inputs) → model output, in place of a plain call with the inputs by name (or by position,
                for a plain module whose parameters have other names).
            progress: show progress bars.
            resume_dir: a folder that keeps each layer's result until `save_pretrained` or `push_to_hub` has the model
                safe. The same call after a kill goes on from there. One process at a time uses it.

        Returns:
            The report, also kept as `pruner.report`.

        Raises:
            MoonshotError: bad data, layers or statistics; each message says what to do.
        """
        require(not torch.is_inference_mode_enabled(), _INFERENCE_MODE)
        self._sweep = None  # its statistics are those of the dense model
        data = self.config.calibration if calibration is None else calibration
        with processes() as ranks, called_by(self.model, forward), rest_onloaded(self.model):
            self.report, store = prune_model(self._subject(loss, progress, ranks), self._config(), data, resume_dir)
        self._unsaved = [*self._unsaved, store]
        self._note_rotation()
        return self.report

    def plan(
        self,
        calibration: Any = None,
        *,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        forward: Forward | None = None,
        resume_dir: str | os.PathLike[str] | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> Plan:
        """What `prune` would take: bytes on the device, the host and the disk, passes over the data, seconds.

        Nothing is pruned, downloaded or written, and the model stays as it is. Seconds are measured, on one batch and
        on a matrix of every shape, unless the weights are not there (a model on the meta device) or the memory is that
        of another machine.

        Args:
            calibration: batches of model inputs are looked at; anything else counts as `num_samples` samples of
                `sequence_length` tokens, or as images of the model's size.
            loss: as for `prune`; the folder is not touched.
            forward: as for `prune`; the folder is not touched.
            resume_dir: as for `prune`; the folder is not touched.
            device_memory: bytes ("80GB" works) of the device in all, the model included; of a model on the meta device
                that of a GPU. None asks this machine.
            host_memory: bytes of host memory that are free; None asks this machine.

        Raises:
            MoonshotError: what `prune` would refuse before its first layer, or a model whose inputs cannot be made up.
        """
        return self._planned(calibration, loss, forward, resume_dir, _room(device_memory, host_memory))

    def _planned(
        self,
        calibration: Any,
        loss: Callable[[Any, Batch], Tensor] | None,
        forward: Forward | None,
        resume_dir: str | os.PathLike[str] | None,
        room: Room | None,
        offload: str | None = None,
    ) -> Plan:
        require(not torch.is_inference_mode_enabled(), _INFERENCE_MODE)
        data = self.config.calibration if calibration is None else calibration
        subject = self._subject(loss, False, SINGLE_PROCESS)
        with rest_onloaded(self.model):
            return make_plan(subject, self._config(), data, forward, resume_dir is not None, room, offload)

    @classmethod
    def plan_for(
        cls,
        name_or_config: Any,
        config: MoonshotConfig,
        *,
        resume_dir: str | os.PathLike[str] | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        offload: str | None = None,
        **options: Any,
    ) -> Plan:
        """The bytes and passes of `prune` for a model whose weights need not be here: its config.json is enough.

        Args:
            name_or_config: a Hub repository or a local folder, or a configuration of transformers.
            config: what would be done.
            resume_dir: as for `plan`.
            device_memory: as for `plan`.
            host_memory: as for `plan`.
            offload: where its decoder layers would be, as for `from_pretrained`.
            options: for `AutoConfig.from_pretrained`, such as `revision`, `token`, `trust_remote_code`; and `dtype`.

        Raises:
            MoonshotError: as `plan`; or a configuration that names no model.
            OSError: there is no such model.
        """
        if offload is not None:
            check_choice("offload", offload, PLACES)
        pruner = cls(meta_device_model(name_or_config, **options), config)
        return pruner._planned(None, None, None, resume_dir, _room(device_memory, host_memory), offload)

    def rotate(
        self,
        calibration: Any = None,
        *,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        resume_dir: str | os.PathLike[str] | None = None,
    ) -> RotationReport:
        """Rotate the model in place, without pruning it: it computes what it did, and loses less when it is pruned.

        The configuration says for which pattern, and how: as with ``rotation="learned"``, where it names no rotation. A
        `prune` or `sweep` that follows takes the model as it is.

        Args:
            calibration: as for `prune`.
            loss: as for `prune`.
            forward: as for `prune`.
            progress: as for `prune`.
            resume_dir: a folder that keeps the state of learning until `save_pretrained` has the model safe. The same
                call after a kill goes on from there.

        Returns:
            The report, also kept as `pruner.rotation`.

        Raises:
            MoonshotError: bad data, or nothing that can be rotated; the model is as it was.
        """
        require(not torch.is_inference_mode_enabled(), _INFERENCE_MODE)
        require(self.rotation is None, "rotate: the model is rotated already")
        data = self.config.calibration if calibration is None else calibration
        config = self.config if self.config.rotation else dataclasses.replace(self.config, rotation="learned")
        self._sweep = None
        with processes() as ranks, called_by(self.model, forward), rest_onloaded(self.model):
            self.rotation, store = run_rotation(self._subject(loss, progress, ranks), config, data, resume_dir)
        self._unsaved = [store]
        return self.rotation

    def _config(self) -> MoonshotConfig:
        """The configuration; without a rotation where the model has had its own."""
        return self.config if self.rotation is None else dataclasses.replace(self.config, rotation=None)

    def _note_rotation(self) -> None:
        """Report and record of a pruned model name the rotation that went before."""
        if self.rotation is None or self.report is None:
            return
        self.report.rotation = self.rotation
        record = PruningRecord.of(self.model)
        if record is not None:
            dataclasses.replace(record, rotation=self.rotation.summary()).attach(self.model)

    def sweep(
        self,
        calibration: Any,
        *,
        lambdas: Sequence[float] | None = None,
        sparsities: Sequence[float] | None = None,
        patterns: Sequence[str] | None = None,
        metric: str | Callable[[nn.Module], float] = "calibration",
        maximize: bool = False,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
    ) -> SweepReport:
        """Prune in many ways on one calibration, and measure each; the model stays dense until `choose`.

        The calibration passes run once, whatever the number of variants. Every variant equals `prune` with its λ,
        sparsity and pattern.

        Args:
            calibration: as for `prune`.
            lambdas: values of λ; None is 0, 0.1, 0.25, 0.5, 0.75, 0.9 and 1, as in the paper.
            sparsities: in place of the configuration's; n:m patterns have their own.
            patterns: in place of the configuration's.
            metric: "calibration" is the perplexity (language models) or mean loss (others) on the calibration data, by
                which the paper selects λ. Or a function of the model, in evaluation mode.
            maximize: whether more of `metric` is better.
            loss: as for `prune`.
            forward: as for `prune`.
            progress: as for `prune`.
            work_dir: a folder for the variants' weights, which take the place of one model each in memory otherwise.
                The same call after a kill goes on from there; it is emptied when the chosen model is saved.

        Raises:
            MoonshotError: bad values, data, layers or statistics.
        """
        require(not torch.is_inference_mode_enabled(), _INFERENCE_MODE)
        chosen = variants(self._config(), lambdas, sparsities, patterns)
        message = "give numbers, or leave it out"
        require(lambdas is None or None not in lambdas, message, field="lambdas", value=lambdas)
        with processes() as ranks, called_by(self.model, forward), rest_onloaded(self.model):
            subject = self._subject(loss, progress, ranks)
            found, report = sweep(subject, chosen, calibration, metric, maximize, work_dir)
        self._sweep = found
        return report

    @contextmanager
    def applied(self, entry: SweepEntry) -> Iterator[nn.Module]:
        """The model with the weights of one of the last sweep's variants, to measure more of it; dense again on exit.

        Raises:
            MoonshotError: as `choose`.
        """
        with self._swept().applied(entry):
            yield self.model

    def prune_path(
        self,
        calibration: Any,
        sparsities: Sequence[float],
        *,
        loss: Callable[[Any, Batch], Tensor] | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
    ) -> SparsityPath:
        """Prune to several sparsities by one calibration and one elimination per layer; the model stays dense.

        Each equals `prune` with that sparsity, whatever the configuration's own is. For solvers that rank removals (OBC
        and CAP); others solve every sparsity on its own, in a `sweep`.

        Args:
            calibration: as for `prune`.
            sparsities: shares of the weights to remove.
            loss: as for `prune`.
            forward: as for `prune`.
            progress: as for `prune`.
            work_dir: a folder for the results, each of which takes the place of one model in memory otherwise. The same
                call after a kill goes on from there.

        Raises:
            MoonshotError: a solver or pattern without such a path, bad data, layers or statistics.
        """
        require(not torch.is_inference_mode_enabled(), _INFERENCE_MODE)
        check_ranked(self.config, sparsities)
        configs = variants(self._config(), [self.config.lam], sparsities, None)
        self._sweep = None

        def applied(report: PruneReport) -> None:
            self.report = report
            self._note_rotation()

        with processes() as ranks, called_by(self.model, forward), rest_onloaded(self.model):
            subject = self._subject(loss, progress, ranks)
            return prune_path(subject, configs, calibration, work_dir, applied)

    def choose(self, entry: SweepEntry) -> PruneReport:
        """Write one of the last sweep's variants into the model, such as ``sweep_report.best(sparsity=0.6)``.

        Raises:
            MoonshotError: no sweep is left to choose from, or the entry is not of it.
        """
        swept = self._swept()
        self.report = swept.choose(entry)
        self._note_rotation()
        self._unsaved = swept.solved.stores
        self._sweep = None
        return self.report

    def compact(self) -> Compaction:
        """Make a structurally pruned model smaller: dead neurons and heads leave every matrix that they touch.

        `pruner.model` becomes a new, smaller model with the same outputs; the one that was pruned stays as it is, full
        of zeros. What an architecture cannot do without stays as zeros, and the report says why.

        After pattern="experts" the model is smaller already: what `prune` did is returned.

        Raises:
            MoonshotError: nothing was pruned, no neuron or head is dead, or the smaller model gives other outputs.
        """
        report = self._pruned()
        if report.config["pattern"] == Experts.kind and report.compaction is not None:
            return Compaction.from_dict(report.compaction)
        require(not is_packed(self.model), _PACKED)
        model, done = compact_model(cast(PreTrainedModel, self.model))  # which refuses another
        dataclasses.replace(PruningRecord.require_of(model), compaction=done.to_dict()).attach(model)
        self.model, report.compaction = model, done.to_dict()
        return done

    def to_runtime(self, runtime: str = "auto", *, batch_shape: tuple[int, int] = (1, 1)) -> dict[str, str]:
        """Hold the pruned layers in another way for inference, in place, as `load_pruned` would have loaded them.

        Packed layers take less memory and, on a processor with a kernel, less time. They cannot be trained or pruned
        further: `to_runtime("dense")` gives back the weights, bit for bit but for the sign of zeros.

        Args:
            runtime: "auto" packs the layers that this device multiplies faster so, when it decodes, and a line in the
                log says which and why; "packed" all that can be; "semi_structured" makes torch's 2:4 tensors of those
                that measure faster on a GPU; "dense" none.
            batch_shape: samples and tokens that a layer sees at once, for which "semi_structured" measures.

        Returns:
            What became of every pruned layer and why, also kept as `model.moonshot_runtime`.

        Raises:
            MoonshotError: nothing was pruned yet, an unknown runtime, or a layer that is not n:m any more.
        """
        self._pruned()
        self._sweep = None  # it holds the dense weights of its variants
        return to_runtime(self.model, runtime, batch_shape)

    def save_pretrained(self, directory: str | os.PathLike[str], format: str | None = None, **options: Any) -> None:
        """Write the pruned (or rotated) model, its tokenizer or image processor, the report, and a model card.

        The files appear in `directory` only when all are written; weights of another model there are removed.
        Of several processes the first one writes, and the others wait for it.

        Args:
            directory: a folder, made if need be.
            format: "dense" loads in plain `from_pretrained` anywhere. "packed" stores the values that survive and one
                bit per weight (2:4 in 16 bits: 9/16 of the bytes); `from_pretrained` reads it after
                ``import optimum_moonshot``, and stops with an error without. None is "packed" for a model that is
                packed in memory, else "dense".
            options: of the model's `save_pretrained`, such as `max_shard_size`.

        Raises:
            MoonshotError: nothing was pruned yet, the folder cannot be written, or format="packed" for a layer that is
                not n:m any more.
        """
        processors = (self.tokenizer, self.processor)

        def save() -> None:
            if self.report is None and self.rotation is not None:
                message = "a rotated model has no zeros to pack; prune it first"
                require(format in (None, "dense"), message, field="format", value=format)
                save_model(self.model, processors, self.rotation, directory, "dense", **options)
            else:
                save_model(self.model, processors, self._pruned(), directory, format, **options)

        on_main_process(save)
        self._discard_results()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        format: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        exist_ok: bool = False,
        commit_message: str | None = None,
        **options: Any,
    ) -> str:
        """Publish what `save_pretrained` writes on the Hub, in one commit.

        The files are written to a temporary folder first (`TMPDIR` says where).

        Args:
            repo_id: "user/name", or a name of your own.
            format: "dense", "packed" or None, as for `save_pretrained`.
            private: whether a new repository is; None is the account's default.
            token: None is the one of `hf auth login`.
            exist_ok: add a commit to a repository that holds files already; it replaces the weights there.
            commit_message: None has a default.
            options: of the model's `save_pretrained`, such as `max_shard_size`.

        Returns:
            The address of the commit.

        Raises:
            MoonshotError: nothing was pruned yet, the token is refused, the repository holds files, or the connection
                broke; nothing is published then.
        """
        report = self._pruned()
        check_saving(self.model, format, options)

        def publish() -> str:
            full = open_repository(repo_id, private=private, token=token, exist_ok=exist_ok)
            with tempfile.TemporaryDirectory() as folder:
                processors = (self.tokenizer, self.processor)
                save_model(self.model, processors, report, folder, format, name=full, **options)
                return upload(folder, full, token=token, commit_message=commit_message)

        address = on_main_process(publish)
        self._discard_results()
        return address

    def _swept(self) -> Sweep:
        """The last sweep, or a `MoonshotError`."""
        if self._sweep is None:
            raise MoonshotError(_NO_SWEEP)
        return self._sweep

    def _pruned(self) -> PruneReport:
        """The report of the last pruning, or a `MoonshotError`."""
        if self.report is None:
            raise MoonshotError(_NOT_PRUNED)
        return self.report

    def _discard_results(self) -> None:
        """Remove the files that a run would go on from: its model is safe."""
        for store in self._unsaved:
            store.discard()
        self._unsaved = []


def _room(device_memory: int | str | None, host_memory: int | str | None) -> Room | None:
    """The memory of another machine, as a caller says it; None where it is this one."""
    sizes = {"device_memory": device_memory, "host_memory": host_memory}
    given = {name: None if size is None else memory_size(name, size) for name, size in sizes.items()}
    return None if not any(given.values()) else Room(given["device_memory"], given["host_memory"])


def _load(
    name_or_path: str | os.PathLike[str],
    shared: dict[str, Any],
    options: dict[str, Any],
    offload: str | None,
    folder: str | None,
) -> tuple[Any, Any]:
    """A model, and what transformers says of its weights; OSError where there is none.

    Args:
        name_or_path: a Hub repository or a local folder.
        shared: for its configuration.
        options: for its weights.
        offload: where the weights of its blocks are, as for `offload_options`.
        folder: where the weights of its blocks are, as for `offload_options`.
    """
    quantized = None
    try:
        config = AutoConfig.from_pretrained(name_or_path, **shared)
        quantized = getattr(config, "quantization_config", None)
        loader: Any = model_class(config)
        if offload is not None:
            options = {**options, **offload_options(config, offload, options.get("device_map"), folder)}
        with folder_of_its_model(options.get("offload_folder") if offload else None) as bind:
            loaded = loader.from_pretrained(name_or_path, output_loading_info=True, **options)
            bind(loaded[0])
        return loaded
    except (MoonshotError, OSError):
        raise
    except Exception as error:  # a damaged file, or a library that is missing, fails anywhere in transformers
        told = " ".join(str(error).split())[:300] or type(error).__name__
        if quantized is None:
            raise MoonshotError(f"{name_or_path}: cannot be loaded ({told})") from error
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise MoonshotError(
            f"{name_or_path}: its weights are quantized ({method}) and cannot be loaded ({told}); "
            "prune the model that they were made from"
        ) from error
