"""What is pruned and how it is called: layers, blocks, losses, facts about a model, neurons and heads, compaction."""
