"""Layers whose weights stay packed in memory."""
