"""What a run and a sweep did: records, JSON, tables, plots."""
