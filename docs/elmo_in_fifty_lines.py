"""ELMo (Peters et al. 2018) in fifty lines of torch, with the trained weights and beside the package's vectors.

python docs/elmo_in_fifty_lines.py [model_cards/elmo-small-en]
"""

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModel, AutoTokenizer

import modeling_elmo  # noqa: F401 (only for the comparison: registers the package's classes with transformers)

folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1] / "model_cards/elmo-small-en")
config = json.loads((folder / "config.json").read_text())
weights = {name.removeprefix("elmo."): w.float() for name, w in load_file(folder / "model.safetensors").items()}


def linear(x, name):
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def token_layer(characters):  # section 3.1: x_k reads nothing but the characters of word k
    x = weights["char_encoder.char_embeddings.weight"][characters].mT  # (words, 16, 50)
    maxima = []
    for i in range(len(config["char_cnn_filters"])):  # Kim et al. 2016: each filter's maximum over the word
        name = f"char_encoder.convolutions.{i}"
        maxima.append(F.conv1d(x, weights[f"{name}.weight"], weights[f"{name}.bias"]).amax(-1))
    x = torch.cat(maxima, -1).relu()
    for i in range(config["num_highway_layers"]):  # Srivastava et al. 2015, equation 3: a gate lets a part of x pass
        gate = linear(x, f"char_encoder.highways.{i}.carry").sigmoid()
        x = gate * linear(x, f"char_encoder.highways.{i}.transform").relu() + (1 - gate) * x
    return linear(x, "token_projection")  # section 3.4: a linear projection down to the size of the LSTMs' outputs


def lstm(inputs, name):  # Sak et al. 2014: an LSTM whose output is projected; the clips are those of the original code
    h, c, outputs = torch.zeros(config["projection_size"]), torch.zeros(config["lstm_hidden_size"]), []
    for x in inputs:
        i, f, o, g = (linear(x, f"{name}.input_linear") + linear(h, f"{name}.state_linear")).chunk(4)
        c = i.sigmoid() * g.tanh() + (f + config["forget_bias"]).sigmoid() * c
        c = c.clamp(-config["cell_clip"], config["cell_clip"])
        h = linear(o.sigmoid() * c.tanh(), f"{name}.projection")
        h = h.clamp(-config["projection_clip"], config["projection_clip"])
        outputs.append(h)
    return torch.stack(outputs)


def direction(x, name):  # section 3.1: h_k,j of one language model; x_k is layer 0
    layers = [x]
    for j in range(config["num_hidden_layers"]):
        h = lstm(layers[-1], f"{name}.layers.{j}")
        layers.append(h + layers[-1] if j else h)  # section 3.4: a residual connection from the first to the second
    return layers


def bilm(characters):  # section 3.2: R_k, the 2L + 1 representations of each word, here as L + 1 layers
    x = token_layer(characters)
    forward, backward = direction(x, "forward_lstm"), direction(x.flip(0), "backward_lstm")
    return [torch.cat([f, b.flip(0)], -1) for f, b in zip(forward, backward, strict=True)]


def elmo(layers, s, gamma):  # equation 1: gamma * sum_j s_j h_k,j, with softmax-normalized s
    return gamma * sum(weight * h for weight, h in zip(torch.tensor(s).softmax(0), layers, strict=True))


inputs = AutoTokenizer.from_pretrained(folder)("The play was a great success on Broadway.", return_tensors="pt")
with torch.no_grad():
    layers, package = bilm(inputs["character_ids"][0]), AutoModel.from_pretrained(folder)(**inputs)
print("largest differences from the package's vectors:")
for j, (layer, h) in enumerate(zip(layers, package.hidden_states, strict=True)):
    print(f"layer {j}  {(layer - h[0]).abs().max():.0e}   {tuple(layer.shape)}")
print(f"mix      {(elmo(layers, [0.0] * len(layers), gamma=1.0) - package.elmo_embeddings[0]).abs().max():.0e}")
