"""Calibration and evaluation data: text, images, batches."""
