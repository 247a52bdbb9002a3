"""The peaks that exceed a limit, each with the options that reduce it."""

from collections.abc import Sequence

from torch import nn

from ..reports.plan import DISK, HOST, Overflow, Snapshot
from .run_spec import RunSpec, module_bytes


def model_overflows(model: nn.Module, run: RunSpec, device_limit: int | None, host_limit: int | None) -> list[Overflow]:
    """Whether the model itself exceeds the memory of another machine; None is this machine's, which has it."""
    device, offloaded = str(run.device), run.offloaded
    size = module_bytes(model) - (offloaded.total if offloaded else 0)
    limit = host_limit if device_limit is None and run.device.type == "cpu" else device_limit
    overflows = []
    if limit is not None and size > limit:
        places = '"disk"' if run.device.type == "cpu" else '"cpu" or "disk"'
        hint = "a narrower dtype, or a larger device"
        hint += "" if offloaded else f"; or its layers elsewhere: offload={places}"
        overflows.append(Overflow(device, "loading", "the model", size, limit, hint))
    if offloaded is not None and offloaded.place == HOST and host_limit and offloaded.total > host_limit:
        layers = "the model's layers"
        overflows.append(Overflow(HOST, "loading", layers, offloaded.total, host_limit, f'offload="{DISK}"'))
    return overflows


def overflows_of(peaks: Sequence[Snapshot], limits: dict[str, int], run: RunSpec) -> list[Overflow]:
    """The peak of each phase at each place, where it exceeds the free memory."""
    overflows = []
    for place, limit in limits.items():
        for phase in dict.fromkeys(peak.phase for peak in peaks):
            peak = max((peak for peak in peaks if peak.phase == phase), key=lambda peak: peak.total(place))
            if peak.total(place) > limit:
                hint = _hint(peak, place, run)
                overflows.append(Overflow(place, phase, peak.where, peak.total(place), limit, hint))
    return overflows


def _hint(peak: Snapshot, place: str, run: RunSpec) -> str:
    """The options that reduce the largest item of a peak."""
    largest = max(peak.items, key=lambda item: peak.items[item].get(place, 0))
    config, host, gradients = run.selection.config, place == HOST, run.selection.needs_gradients
    shorter = ["lower batch_size" if run.batch > 1 else "lower sequence_length"]
    options: dict[str, list[str]] = {
        "caches": ["set offload_dir" if host else "lower max_memory", "lower num_samples or sequence_length"],
        "statistics": [
            "set offload_dir and lower max_memory" if host else "lower max_memory",
            *(["lower num_samples"] if gradients else []),
            *(['fisher="attention"'] if gradients and config.fisher == "all" else []),
            'solver="wanda"',
        ],
        "solver": [
            *(["lower num_samples", 'fisher="attention" or lam=1'] if gradients else []),
            'solver="wanda"',
        ],
        "activations": shorter,
        "logits": shorter,
        "weights of a block": ["a narrower dtype"],
        "rotated weights": ['offload="disk"' if host else "another offload_dir", "no rotation"],
        "results": ["a machine with more memory" if run.resumes else "give a resume_dir"],
    }
    return ", or ".join(options.get(largest, ["a machine with more memory"]))
