"""How ELMo is fast: the kernels, and what decides between them. They know weights and options, and no model."""
