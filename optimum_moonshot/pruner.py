"""`MoonshotPruner`, the entry point: load → prune → save."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from .checkpoint.in_memory import to_runtime
from .checkpoint.loading import load_dense, load_meta
from .checkpoint.origin import SideFiles, find_origin, source_of
from .checkpoint.saving import Saving
from .config import MoonshotConfig
from .errors import MoonshotError, check_path, require
from .model.isolation import isolated, uncompiled
from .model.losses import OutputLoss, has_head
from .pipeline.run_context import check_idle, run_context
from .pipeline.selection import Subject, select
from .plan.run import make_plan
from .prune.record import compact_pruned, note_rotation, note_vocabulary, remove_tokens
from .prune.run import prune_model, rotate_model
from .reports.record import PruningRecord
from .shrink.hidden_size import narrow_model
from .shrink.report import ShrinkReport, Target
from .shrink.run import shrink_model
from .sweep.run import SparsityPath, Sweep, prune_path, sweep

if TYPE_CHECKING:
    from .model.calls import Forward
    from .model.compaction import Compaction
    from .model.layers import PrunableLayer
    from .model.losses import Loss
    from .plan.report import Plan
    from .reports.prune_report import PruneReport
    from .rotate.report import RotationReport
    from .shrink.hidden_size import WidthReduction
    from .sweep.report import SweepEntry, SweepReport


# The configuration of a pruner that was given none.
WITHOUT_PATTERN = MoonshotConfig(solver="osscar", pattern="structured", sparsity=0.0)


def selected_layers(model: nn.Module, config: MoonshotConfig) -> list[PrunableLayer]:
    """The layers of a model that a run would prune; `MoonshotError` if the configuration does not fit."""
    with isolated(model) as plain:
        return select(plain, config).layers


class MoonshotPruner:
    """One-shot pruning of a model, in place.

    ```python
    config = MoonshotConfig(solver="sparsegpt", pattern="2:4", lam=0.9)
    pruner = MoonshotPruner.from_pretrained("meta-llama/Llama-3.2-1B", config)
    report = pruner.prune("c4")
    pruner.save_pretrained("Llama-3.2-1B-2of4")
    ```

    Args:
        model: a `PreTrainedModel`, on any device. It changes only once every layer has its result; a run that fails or
            is interrupted leaves it unchanged. A model that was pruned while it was loaded can be saved at once. Of a
            model from `torch.compile(model)`, `pruner.model` is the module inside, whose weights it shares.
        config: the method; may be left out for `shrink` and `reduce_width`.
        tokenizer: for calibration on text; saved with the model.
        processor: image processor, for calibration on images; saved with the model. For a plain module, a function
            from an image to its tensor [C, H, W].

    Raises:
        MoonshotError: another type of model or configuration, or a model with a part from `torch.compile(part)`.
    """

    def __init__(
        self, model: nn.Module, config: MoonshotConfig | None = None, tokenizer: Any = None, processor: Any = None
    ):
        require(isinstance(model, nn.Module), f"model is a {type(model).__name__}: give a PreTrainedModel")
        config = WITHOUT_PATTERN if config is None else config
        require(isinstance(config, MoonshotConfig), f"config is a {type(config).__name__}: give a MoonshotConfig")
        self.model, self.config, self.tokenizer, self.processor = uncompiled(model), config, tokenizer, processor
        self._without_pattern = config is WITHOUT_PATTERN
        self._origin, self._side_files = find_origin(self.model), SideFiles(source_of(self.model))
        # A model that was pruned while it was loaded has its report.
        self.report: PruneReport | None = getattr(model, "moonshot_report", None)
        self.rotation: RotationReport | None = None  # of `rotate`
        self.vocabulary: ShrinkReport | None = None  # of `shrink`, where nothing but the vocabulary is smaller
        self._sweep: Sweep | None = None
        self._discards: list[Callable[[], None]] = []  # delete the files of runs, once the model is saved

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.model.parameters())
        return f"{type(self).__name__}({type(self.model).__name__}, {count:,} parameters, {self.config!r})"

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | os.PathLike[str],
        method: MoonshotConfig | None = None,
        offload: str | None = None,
        **model_kwargs: Any,
    ) -> MoonshotPruner:
        """Load a model as the class named by its configuration, with its tokenizer and image processor if any.

        Quantized weights that transformers can dequantize (FP8, MXFP4, GGUF, compressed-tensors) are loaded in 16 bits,
        and saved so.

        Args:
            name_or_path: a Hub repository or a local folder; or a GGUF file, "model.gguf" or "owner/repo/model.gguf".
            method: also accepted as `config`; may be left out for `shrink` and `reduce_width`.
            offload: "disk" keeps the weights of the decoder layers in the checkpoint's files, "cpu" in host memory; one
                layer at a time is on the device, which `device_map` may name. None loads the whole model.
            model_kwargs: for the model's `from_pretrained`, such as `dtype`, `device_map`, `revision`, `cache_dir`,
                `subfolder`, `gguf_file`, and `config` of transformers; tokenizer and processor are found by them too.

        Raises:
            MoonshotError: the checkpoint is damaged or quantized, or lacks weights of the model.
            OSError: there is no such model.
        """
        if method is None:
            method = model_kwargs.pop("config", WITHOUT_PATTERN)
        if not isinstance(method, MoonshotConfig):
            raise MoonshotError(f"config is a {type(method).__name__}: give a MoonshotConfig")
        model, tokenizer, processor = load_dense(name_or_path, model_kwargs, offload, method.offload_dir)
        return cls(model, method, tokenizer, processor)

    def _run(
        self, call: str | None, loss: Loss | None, forward: Forward | None, progress: bool, **folders: Any
    ) -> AbstractContextManager[Subject]:
        for name, folder in folders.items():
            if folder is not None:
                check_path(name, folder)
        configured = not self._without_pattern or call in ("shrink", "reduce_width")
        hint = 'such as MoonshotConfig.recipe("2:4"), or MoonshotConfig(sparsity=0.5)'
        require(configured, "no configuration says what to remove: give one", field="config", hint=hint)
        if loss is None and not has_head(type(self.model)):  # no logits for a cross-entropy
            loss = OutputLoss(self.model, self.config.seed)
        subject = Subject(self.model, self.tokenizer, self.processor, loss, progress)
        return run_context(subject, forward, call)

    @property
    def _config(self) -> MoonshotConfig:
        """The configuration, without a rotation if the model is rotated already."""
        return self.config if self.rotation is None else dataclasses.replace(self.config, rotation=None)

    def prune(
        self,
        calibration: Any = None,
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        resume_dir: str | os.PathLike[str] | None = None,
    ) -> PruneReport:
        """Prune the model in place; pattern="experts" makes it smaller in place.

        All processes of a `torch.distributed` group call this together. They share the samples and the layers, and all
        end with the model that a single process would produce.

        Args:
            calibration: "c4", "wikitext2", "ptb", a path to text, JSON (lines), CSV or Parquet, the name of a data set
                on the Hub, a list of strings or of conversations, a `datasets.Dataset`, or an iterable of model inputs:
                dictionaries, or pairs of inputs and labels. For an image model, a folder with one sub-folder of images
                per class, Parquet, a Hub name or a `Dataset` with a column of images. "self" or a `SelfCalibration`:
                text that the dense model generates first. None: `config.calibration`. Magnitude pruning needs no data,
                but reports losses if given some.
            loss: (model output, inputs) → losses [B], which replaces the cross-entropy in the Fisher loss.
            forward: (model, inputs) → model output, which replaces a call with the inputs by name (or by position, for
                a plain module with other parameter names).
            progress: show progress bars.
            resume_dir: a folder for the result of each layer, until `save_pretrained` or `push_to_hub`; the same call
                resumes there after an interruption. One process at a time uses it.

        Returns:
            The report, also kept as `pruner.report`.

        Raises:
            MoonshotError: bad data, layers or statistics, with a hint.
        """
        with self._run("prune", loss, forward, progress, resume_dir=resume_dir) as subject:
            self._sweep = None  # its statistics are those of the dense model
            report, discard = prune_model(subject, self._config, calibration, resume_dir)
        self._discards.append(discard)
        return self._reported(report)

    def plan(
        self,
        calibration: Any = None,
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
        resume_dir: str | os.PathLike[str] | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
    ) -> Plan:
        """Estimate `prune`: bytes on the device, the host and the disk, passes over the data, seconds.

        Nothing is pruned, downloaded or written. The first blocks of every kind pass a few samples, and some rows of
        their matrices are solved; all else is multiplied. On the meta device bytes follow from the layers' shapes, and
        there are no seconds, as for the memory of another machine.

        Args:
            calibration: batches of model inputs are used; anything else counts as `num_samples` samples of
                `sequence_length` tokens, or as images of the model's size.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.
            resume_dir: the folder that `prune` would use; its bytes on the disk are counted, and it is not opened.
            device_memory: total bytes (or "80GB") of the device, model included; for a model on the meta device, of a
                GPU. None: of this machine.
            host_memory: free bytes of host memory; None: of this machine.

        Raises:
            MoonshotError: any error that `prune` raises before its first layer, or a model without known inputs.
        """
        data = self.config.calibration if calibration is None else calibration
        resumes = resume_dir is not None
        with self._run(None, loss, None, False, resume_dir=resume_dir) as subject:
            limits = device_memory, host_memory
            return make_plan(subject, self._config, data, forward, resumes, *limits)

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
        """Estimate the bytes and passes of `prune` from a model's config.json, without its weights.

        Args:
            name_or_config: a Hub repository or a local folder, or a configuration of transformers.
            config: the method.
            resume_dir: the folder that `prune` would use; it is not opened.
            device_memory: total bytes (or "80GB") of the GPU; None: of this machine.
            host_memory: free bytes of host memory; None: of this machine.
            offload: "cpu" or "disk", the place of the weights of the decoder layers; None: the device.
            options: for `AutoConfig.from_pretrained`, such as `revision`, `token`, `trust_remote_code`; and `dtype`.

        Raises:
            MoonshotError: any error that `prune` raises before its first layer, or a configuration that names no model.
            OSError: there is no such model.
        """
        pruner = cls(load_meta(name_or_config, offload, **options), config)
        resumes = resume_dir is not None
        with pruner._run(None, None, None, False, resume_dir=resume_dir) as subject:
            limits = device_memory, host_memory, offload
            return make_plan(subject, config, config.calibration, None, resumes, *limits)

    def rotate(
        self,
        calibration: Any = None,
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        resume_dir: str | os.PathLike[str] | None = None,
    ) -> RotationReport:
        """Rotate the model in place without pruning it: its outputs stay the same, and later pruning loses less.

        The rotation is learned for the pattern of the configuration; ``rotation="learned"`` is the default here. A
        later `prune` or `sweep` does not rotate again.

        Args:
            calibration: data in any form that `prune` accepts.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.
            progress: show progress bars.
            resume_dir: a folder for the state of learning; the same call resumes there after an interruption.

        Returns:
            The report, also kept as `pruner.rotation`.

        Raises:
            MoonshotError: bad data, or nothing that can be rotated; the model is unchanged.
        """
        require(self.rotation is None, "rotate: the model is rotated already")
        with self._run("rotate", loss, forward, progress, resume_dir=resume_dir) as subject:
            config = self.config if self.config.rotation else dataclasses.replace(self.config, rotation="learned")
            self._sweep = None
            rotation, discard = rotate_model(subject, config, calibration, resume_dir)
            self.rotation = dataclasses.replace(rotation, notes=(*rotation.notes, *self._origin.notes))
        self._discards = [discard]
        return self.rotation

    def sweep(
        self,
        calibration: Any,
        *,
        lambdas: Sequence[float] | None = None,
        sparsities: Sequence[float] | None = None,
        patterns: Sequence[str] | None = None,
        metric: str | Callable[[nn.Module], float] = "calibration",
        maximize: bool = False,
        loss: Loss | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
    ) -> SweepReport:
        """Prune in many ways on one calibration, and measure each; the model stays dense until `choose`.

        The calibration passes run once for all variants. Every variant equals `prune` with its λ, sparsity and pattern.

        Args:
            calibration: data in any form that `prune` accepts.
            lambdas: values of λ; None: 0, 0.1, 0.25, 0.5, 0.75, 0.9 and 1, as in the paper.
            sparsities: None: the configuration's; n:m patterns imply theirs.
            patterns: None: the configuration's.
            metric: "calibration": the perplexity (language models) or mean loss (others) on the calibration data, by
                which the paper selects λ; or a function of the model, which is in evaluation mode.
            maximize: whether a higher `metric` is better.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.
            progress: show progress bars.
            work_dir: a folder for the variants' weights, which otherwise use the memory of one model each. The same
                call resumes there after an interruption; it is emptied when the chosen model is saved.

        Raises:
            MoonshotError: bad values, data, layers or statistics.
        """
        with self._run("sweep", loss, forward, progress, work_dir=work_dir) as subject:
            grid = (lambdas, sparsities, patterns)
            self._sweep = sweep(subject, self._config, calibration, grid, metric, maximize, work_dir)
        return self._sweep.report

    @contextmanager
    def applied(self, entry: SweepEntry) -> Iterator[nn.Module]:
        """The model with the weights of a variant of the last sweep, for further measurements; dense again on exit.

        Calls that change or save weights are refused inside of the block.

        Raises:
            MoonshotError: there is no sweep, the entry belongs to another, or a variant is applied already.
        """
        with self._swept().applied(entry):
            yield self.model

    def prune_path(
        self,
        calibration: Any,
        sparsities: Sequence[float],
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        work_dir: str | os.PathLike[str] | None = None,
    ) -> SparsityPath:
        """Prune to several sparsities by one calibration and one elimination per layer; the model stays dense.

        Each result equals `prune` with that sparsity. For solvers that rank removals (OBC and CAP); `sweep` solves for
        each sparsity separately with any other.

        Args:
            calibration: data in any form that `prune` accepts.
            sparsities: fractions of the weights to remove, which replace the configuration's.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.
            progress: show progress bars.
            work_dir: a folder for the weights of the results, which otherwise use the memory of one model each.

        Raises:
            MoonshotError: another solver or pattern, bad data, layers or statistics.
        """
        with self._run("prune_path", loss, forward, progress, work_dir=work_dir) as subject:
            self._sweep = None
            return prune_path(subject, self._config, calibration, sparsities, work_dir, self._reported)

    def choose(self, entry: SweepEntry) -> PruneReport:
        """Write a variant of the last sweep into the model, such as ``sweep_report.best(sparsity=0.6)``.

        Raises:
            MoonshotError: there is no sweep to choose from, the entry belongs to another, or a variant is applied.
        """
        swept = self._swept()
        report = swept.choose(entry)
        self._discards, self._sweep = [swept.solved.discard], None
        return self._reported(report)

    def compact(self) -> Compaction:
        """Remove the dead neurons and heads of a structurally pruned model from all its matrices.

        `pruner.model` becomes a new, smaller model with the same outputs; the pruned one is unchanged. Zeros that the
        architecture requires remain, and the report gives the reason. pattern="experts" makes the model smaller in
        `prune`, whose compaction is returned.

        Raises:
            MoonshotError: nothing was pruned, no neuron or head is dead, or the smaller model gives other outputs.
        """
        if PruningRecord.of(self.model) is None:
            self._pruned()
        self.model, compaction = compact_pruned(self.model, self.report)
        return compaction

    def reduce_width(
        self,
        hidden_size: int,
        calibration: Any = None,
        *,
        loss: Loss | None = None,
        forward: Forward | None = None,
    ) -> WidthReduction:
        """Reduce the hidden size of a dense model by removing the least important directions of its residual stream.

        `pruner.model` becomes a new dense model of the same class; the given one is unchanged. All matrices become
        smaller in proportion, with embeddings and head; a later `prune` removes neurons and heads, or weights.

        Args:
            hidden_size: of the smaller model.
            calibration: data in any form that `prune` accepts.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.

        Returns:
            The changes.

        Raises:
            MoonshotError: the model is pruned already, bad data, a model without a residual stream between RMS norms,
                or a width that the architecture does not support.
        """
        require(self.report is None, "reduce_width: the model is pruned already", hint="reduce the width first")
        with self._run("reduce_width", loss, forward, False) as subject:
            self.model, reduction = narrow_model(subject, self.config, hidden_size, calibration)
        self._sweep = None
        return reduction

    def shrink(
        self,
        calibration: Any = None,
        *,
        parameters: float | None = None,
        bytes: float | str | None = None,
        latency: float | None = None,
        vocabulary: Any = None,
        batch_shape: tuple[int, int] = (1, 1),
        hidden_multiple: int | None = None,
        loss: Loss | None = None,
        forward: Forward | None = None,
        progress: bool = True,
        resume_dir: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> ShrinkReport:
        """Make the model smaller: remove tokens, or the blocks, neurons and heads that a target requires, or both.

        An integer program combines the losses of these parts on the calibration data. `pruner.model` becomes a new
        dense model with a smaller configuration; the given one is unchanged. The pruner needs no `MoonshotConfig`, or
        one of ``solver="osscar", pattern="structured", sparsity=0``. Unless λ is set, it is 0.5 with heads, else 1.

        A smaller `vocabulary` needs no target and no calibration pass; `pruner.tokenizer` becomes a smaller one. Text
        of the remaining tokens has the same tokens and logits as before, other text has more tokens, since all
        characters remain. A pruned model can lose tokens too. With a target, tokens are removed first.

        Args:
            calibration: data in any form that `prune` accepts.
            parameters: a fraction of the dense model's if at most 1, else a number.
            bytes: of the weights: a fraction of the dense model's if at most 1, else a number, or text such as "2GB".
            latency: of a forward pass on this machine: a fraction if at most 1, else milliseconds.
            vocabulary: text whose tokens remain; or a number, of the most frequent tokens in the calibration text.
            batch_shape: samples and tokens of this forward pass; 1 token is decoded after a context.
            hidden_multiple: a divisor of a smaller hidden size, such as the block of a quantized format.
            loss: (model output, inputs) → losses [B], in place of the cross-entropy.
            forward: (model, inputs) → model output, in place of a call of the model.
            progress: show progress bars.
            resume_dir: a folder for the measurements, which serve any target; a later call reuses them.
            options: fields of `MoonshotConfig`, such as `num_samples` or `recover`, which replace those of the pruner.

        Returns:
            The decision, also kept as ``pruner.report.shrink``; of a vocabulary alone as `pruner.vocabulary`.

        Raises:
            MoonshotError: no target or several, one that no combination reaches, or tokens that cannot be removed.
        """
        target = Target.optional(vocabulary is None, parameters=parameters, bytes=bytes, latency=latency)
        self.config = self.config.changed(options)
        done = vocabulary is not None and self.vocabulary is not None
        require(not done, "the vocabulary is smaller already", field="vocabulary", hint="load the model again")
        with self._run("shrink", loss, forward, progress, resume_dir=resume_dir) as subject:
            arguments = (batch_shape, forward, resume_dir, hidden_multiple, vocabulary)
            result = shrink_model(subject, self._config, calibration, target, *arguments)
        self.model, self._sweep, self._discards = result.model, None, [*self._discards, result.discard]
        if vocabulary is not None:
            self._side_files.replaced |= result.replaced_files
            self.tokenizer = result.tokenizer
        if isinstance(result.report, ShrinkReport):
            return self._without_tokens(result.report)
        return cast(ShrinkReport, self._reported(result.report).shrink)

    def _without_tokens(self, shrunk: ShrinkReport) -> ShrinkReport:
        """Keep the report of a smaller vocabulary, also in that of an earlier pruning."""
        self.vocabulary = shrunk
        if self.report is not None:
            remove_tokens(self.report, shrunk)
        note_vocabulary(self.model, self.report, shrunk)
        return shrunk

    def to_runtime(self, runtime: str = "auto", *, inputs: str = "int8") -> dict[str, str]:
        """Convert the pruned layers for inference, in place, as `load_pruned` does.

        Packed layers take less memory and, on a processor with a kernel, less time. They cannot be trained or pruned
        further; `to_runtime("dense")` restores the weights bit for bit, except the sign of zeros.

        Args:
            runtime: "auto" packs the layers that this device decodes faster packed, and logs which and why; "packed"
                packs all that can be; "dense" unpacks all.
            inputs: "int8" rounds the inputs of products with integer codes to 8 bits; "float" never rounds them.

        Returns:
            The runtime of every pruned layer with the reason, also kept as `model.moonshot_runtime`.

        Raises:
            MoonshotError: nothing was pruned yet, an unknown runtime, or a layer that is no longer n:m, or no longer on
                its grid.
        """
        check_idle(self.model, "to_runtime")
        if PruningRecord.of(self.model) is None:
            self._pruned()
        self._sweep = None  # it holds the dense weights of its variants
        return to_runtime(self.model, runtime, inputs)

    def save_pretrained(self, directory: str | os.PathLike[str], format: str | None = None, **options: Any) -> None:
        """Write the pruned (or rotated) model, its tokenizer or image processor, the report, and a model card.

        Files beside the weights that the model was loaded from are copied, so that the folder works where that one did.
        The files appear in `directory` all at once, and replace weights of another model there. The first of several
        processes writes them; the others wait.

        Args:
            directory: a folder, created if missing.
            format: "dense" loads in plain `from_pretrained` anywhere. "packed" stores the surviving values and one bit
                per weight (2:4 in 16 bits: 9/16 of the bytes); `from_pretrained` reads it after
                ``import optimum_moonshot``, and fails without. "compressed-tensors", for a model that is quantized to 8
                or 4 bits, is read by vLLM and transformers. None: "packed" for a model that is packed in memory, else
                "dense".
            options: of the model's `save_pretrained`, such as `max_shard_size`.

        Raises:
            MoonshotError: nothing was pruned yet, the folder cannot be written, or format="packed" for a layer that is
                no longer n:m, or no longer on its grid.
        """
        check_idle(self.model, "save_pretrained")
        self._saving(format, options).save(directory)
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
        """Publish the files of `save_pretrained` on the Hub in one commit, from a temporary folder (in `TMPDIR`).

        Args:
            repo_id: "user/name", or a name of your own.
            format: "dense", "packed" or "compressed-tensors", as `save_pretrained` writes them.
            private: visibility of a new repository; None: the account's default.
            token: None: of `hf auth login`.
            exist_ok: allow a repository with files, whose weights the commit replaces.
            commit_message: None: one that names this package.
            options: of the model's `save_pretrained`, such as `max_shard_size`.

        Returns:
            The address of the commit.

        Raises:
            MoonshotError: nothing was pruned yet, the token is refused, the repository contains files, or the
                connection broke; nothing is published then.
        """
        check_idle(self.model, "push_to_hub")
        repository = {"private": private, "exist_ok": exist_ok}
        address = self._saving(format, options).publish(repo_id, commit_message, token, **repository)
        self._discard_results()
        return address

    def _saving(self, format: str | None, options: dict[str, Any]) -> Saving:
        companions = (self.tokenizer, self.processor, self._side_files)
        return Saving(self.model, companions, self._result(), format, self._origin, options)

    def _swept(self) -> Sweep:
        if self._sweep is None:
            raise MoonshotError("no sweep to choose from: call pruner.sweep(calibration) first")
        return self._sweep

    def _pruned(self) -> PruneReport:
        if self.report is not None:
            return self.report
        if PruningRecord.of(self.model) is None:
            raise MoonshotError("the model is not pruned yet: call pruner.prune(calibration) first")
        hint = "save it by model.save_pretrained or model.push_to_hub"
        raise MoonshotError("the model was pruned before this pruner got it, which has no report of it", hint=hint)

    def _result(self) -> PruneReport | RotationReport | ShrinkReport:
        """The report of the last pruning, else of the rotation, else of the vocabulary."""
        if self.report is None and self.rotation is not None and self.vocabulary is not None:
            return dataclasses.replace(self.rotation, notes=(*self.rotation.notes, self.vocabulary.line()))
        others = self.rotation or self.vocabulary
        return self._pruned() if self.report is not None or others is None else others

    def _reported(self, report: PruneReport) -> PruneReport:
        """Keep the report of a pruning, with an earlier rotation."""
        self.report = report
        report.notes += self._origin.notes
        if self.rotation is not None:
            note_rotation(self.model, report, self.rotation)
        if self.vocabulary is not None:
            note_vocabulary(self.model, report, self.vocabulary)
        return report

    def _discard_results(self) -> None:
        """Delete the files of unfinished runs: the model is saved."""
        for discard in self._discards:
            discard()
        self._discards = []
