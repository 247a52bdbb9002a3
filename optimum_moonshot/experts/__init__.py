"""Removing whole experts from mixtures, by both objectives."""
