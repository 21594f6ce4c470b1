"""ELMo in loops over words, steps and filters, in float64 numpy, independent of the package's code."""

import numpy as np


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def clip(x, bound):
    return x if bound is None else np.clip(x, -bound, bound)


class PlainELMo:
    """Computes one word, one step and one sequence at a time from a state dict and a config."""

    def __init__(self, state_dict, config):
        self.weights = {name: tensor.double().numpy() for name, tensor in state_dict.items()}
        self.config = config

    def __call__(self, words, ids=None):
        """Layers of one sequence `words` (time, max_word_length): `(layers + 1, time, 2 * projection_size)`.

        `ids` (time,) belong to words with vectors of their own.
        """
        ids = [None] * len(words) if ids is None else ids
        tokens = np.stack([self.token(*pair) for pair in zip(words, ids, strict=True)])
        forward, backward = self.direction("forward", tokens), self.direction("backward", tokens[::-1])
        layers = [np.concatenate([tokens, tokens], -1)]
        return np.stack([*layers, *(np.concatenate([f, b[::-1]], -1) for f, b in zip(forward, backward, strict=True))])

    def token(self, word, word_id=None):
        parts = [] if word_id is None else [self.weights["word_embeddings.weight"][word_id]]
        if "char_encoder.char_embeddings.weight" in self.weights:
            parts.append(self.characters(word))
        x = np.concatenate(parts)
        return self.linear("token_projection", x) if "token_projection.weight" in self.weights else x

    def characters(self, word):
        embedded = self.weights["char_encoder.char_embeddings.weight"][word]
        pooled = []
        for index, (width, _) in enumerate(self.config.char_cnn_filters):
            kernel = self.weights[f"char_encoder.convolutions.{index}.weight"]
            bias = self.weights[f"char_encoder.convolutions.{index}.bias"]
            windows = [embedded[start : start + width] for start in range(len(word) - width + 1)]
            pooled.append(np.max([np.einsum("wc,fcw->f", window, kernel) + bias for window in windows], axis=0))
        x = np.concatenate(pooled)
        x = np.maximum(x, 0) if self.config.char_cnn_activation == "relu" else np.tanh(x)
        for index in range(self.config.num_highway_layers):
            gate = sigmoid(self.linear(f"char_encoder.highways.{index}.carry", x))
            x = gate * np.maximum(self.linear(f"char_encoder.highways.{index}.transform", x), 0) + (1 - gate) * x
        return x

    def linear(self, name, x):
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0)

    def direction(self, name, tokens, states=None):
        """Outputs of every layer, each `(time, projection_size)`; `states` (one (h, c) a layer) is updated in place."""
        outputs, inputs = [], tokens
        for layer in range(self.config.num_hidden_layers):
            hidden = np.zeros(self.config.projection_size) if states is None else states[layer][0]
            cell = np.zeros(self.config.lstm_hidden_size) if states is None else states[layer][1]
            steps = []
            for x in inputs:
                hidden, cell = self.step(f"{name}_lstm.layers.{layer}", x, hidden, cell)
                steps.append(hidden + x if layer and self.config.use_skip_connections else hidden)
            if states is not None:
                states[layer] = (hidden, cell)
            inputs = np.stack(steps)
            outputs.append(inputs)
        return outputs

    def step(self, name, x, hidden, cell):
        gates = self.linear(f"{name}.input_linear", x) + self.linear(f"{name}.state_linear", hidden)
        i, f, o, g = np.split(gates, 4)
        cell = sigmoid(i) * np.tanh(g) + sigmoid(f + self.config.forget_bias) * cell
        cell = clip(cell, self.config.cell_clip)
        hidden = sigmoid(o) * np.tanh(cell)
        if self.config.lstm_hidden_size != self.config.projection_size:
            hidden = clip(self.linear(f"{name}.projection", hidden), self.config.projection_clip)
        return hidden, cell
