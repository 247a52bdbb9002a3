"""Results of runs and sweeps: records, JSON, tables, plots."""
