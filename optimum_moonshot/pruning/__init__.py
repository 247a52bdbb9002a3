"""The run: its order of work, solving a layer, allocation, recovery, results that survive a crash, sweep."""
