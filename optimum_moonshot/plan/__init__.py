"""Dry runs: memory by place, calibration passes and seconds of a run before it starts."""
