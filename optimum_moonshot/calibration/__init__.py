"""Calibration statistics: hooks that collect them during passes over the data, and their storage."""
