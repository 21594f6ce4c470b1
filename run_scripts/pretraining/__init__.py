"""Training a biLM, from its text to its checkpoints."""
