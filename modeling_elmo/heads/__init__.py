"""Task models on ELMo, the parts of their networks, and their pipelines."""
