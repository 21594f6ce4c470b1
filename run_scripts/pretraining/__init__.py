"""Training a biLM: corpus, batches, loop, optimization, checkpoints, evaluation."""
