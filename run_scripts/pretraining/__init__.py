"""Training a biLM, from its text to its checkpoints.

The way of a sentence from a file to the loss:

`corpus.py` reads it: a line of text, with its file and line number.
`batches.py` looks up its words in the tokenizer's table and fills a batch of whole sentences, or windows of a text
without end, in which LSTM states are carried.
`loop.py` passes the batch to the model, which computes the loss, and updates the weights with `optimization.py`.
`evaluation.py` reads held-out text in the same way; `checkpoints.py` saves the run.
"""
