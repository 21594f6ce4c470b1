"""Training heads: data, tasks, metrics, cached features, word vectors."""
