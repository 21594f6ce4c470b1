"""Where the biLMs and the mixes are among the arrays of a task model of AllenNLP, whatever its class.

A biLM has two parts, and a name is the path of a module with a dot after each, and then an array:

    text_field_embedder.token_embedder_elmo._elmo._elmo_lstm._token_embedder.char_conv_0.weight
    text_field_embedder.token_embedder_elmo._elmo._elmo_lstm._elmo_lstm.forward_layer_0.input_linearity.weight
    text_field_embedder.token_embedder_elmo._elmo.scalar_mix_0.scalar_parameters.0

What comes before the last part is not the same in any two models, so that a biLM is found by the names of its arrays.
"""

import os
import re
from collections.abc import Collection, Iterable
from itertools import count, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from modeling_elmo.conversion import files

State = dict[str, Tensor]

CHARACTER_PART, LSTM_PART = "_token_embedder", "_elmo_lstm"  # AllenNLP's names of the parts
CHARACTER_ARRAY = "_char_embedding_weights"  # only a biLM has it
FIRST_LAYER = "forward_layer_0.input_linearity.weight"
FIRST_PROJECTION = "forward_layer_0.state_projection.weight"
ARRAYS = {
    CHARACTER_PART: re.compile(
        rf"{CHARACTER_ARRAY}|(char_conv_\d+|_highways\._layers\.\d+|_projection)\.(weight|bias)"
    ),
    LSTM_PART: re.compile(r"(forward|backward)_layer_\d+\..+"),
}
LAYER_WEIGHT = f"{LSTM_PART}.forward_layer_{{}}.input_linearity.weight"
FILTER_WEIGHT = f"{CHARACTER_PART}.char_conv_{{}}.weight"
HIGHWAY_WEIGHT = f"{CHARACTER_PART}._highways._layers.{{}}.weight"
DEEPEST = 3  # dictionaries in a file of weights


class BiLM(NamedTuple):
    """The beginnings of the names of a biLM's parts and mixes, with the last dot."""

    characters: str
    lstm: str
    mixes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The path of the module that has both parts."""
        return ".".join(common_modules(self.characters, self.lstm))

    def arrays(self, state: State) -> State:
        """Its arrays, with names that begin with `CHARACTER_PART` or `LSTM_PART`."""
        arrays = {}
        for part, beginning in ((CHARACTER_PART, self.characters), (LSTM_PART, self.lstm)):
            for name, array in state.items():
                rest = name.removeprefix(beginning)
                if name.startswith(beginning) and ARRAYS[part].fullmatch(rest):
                    arrays[f"{part}.{rest}"] = array
        return arrays

    def full_name(self, name: str) -> str:
        """The name in the task model of an array of `arrays`."""
        part, _, rest = name.partition(".")
        return (self.characters if part == CHARACTER_PART else self.lstm) + rest


def named_arrays(content: Any, beginning: str = "", depth: int = DEEPEST) -> Iterable[tuple[str, Tensor]]:
    """The arrays of a dictionary, also of those in it: some programs save a state and the number of a step."""
    if not isinstance(content, dict) or not depth:
        return
    for name, item in content.items():
        if files.is_array(item):
            yield f"{beginning}{name}", item.detach()
        else:
            yield from named_arrays(item, f"{beginning}{name}.", depth - 1)


def common_modules(first: str, second: str) -> list[str]:
    """The modules with which both names begin."""
    return list(os.path.commonprefix([name.split(".")[:-1] for name in (first, second)]))


def parent_of(beginning: str) -> list[str]:
    return beginning.split(".")[:-2]


def beginnings(names: Iterable[str], array: str) -> list[str]:
    """What comes before the name of an array, wherever it is."""
    return [name.removesuffix(array) for name in names if f".{name}".endswith(f".{array}")]


def how_many(names: Collection[str], pattern: str) -> int:
    """How many names there are with the numbers 0, 1, 2 and so on in the pattern, without a gap."""
    return sum(1 for _ in takewhile(lambda number: pattern.format(number) in names, count()))


def find_bilms(state: State, weights: Path) -> list[BiLM]:
    """The different biLMs with their mixes.

    A module with two names has its arrays twice, and one frozen biLM may be in several embedders with a mix each. Both
    are one biLM.
    """
    bilms = []
    for characters in beginnings(state, CHARACTER_ARRAY):
        lstm = lstm_of(characters, state, weights)
        if lstm is not None:
            bilms.append(BiLM(characters, lstm))
    different: list[BiLM] = []
    for bilm in bilms:
        bilm = bilm._replace(mixes=mixes_near(bilm, bilms, state))
        same = [other for other in different if are_equal(bilm.arrays(state), other.arrays(state))]
        if same:
            different[different.index(same[0])] = with_mixes_of(same[0], bilm, state)
        else:
            different.append(bilm)
    return different


def lstm_of(characters: str, state: State, weights: Path) -> str | None:
    """The LSTM that reads the words of a character encoder: the nearest with a projection, or else one next to it.

    Networks of tasks have LSTMs with these names, but without a projection.
    """
    lstms = beginnings(state, FIRST_LAYER)
    projected = [lstm for lstm in lstms if lstm + FIRST_PROJECTION in state]
    beside = [lstm for lstm in lstms if parent_of(lstm) == parent_of(characters)]
    depths = {lstm: len(common_modules(characters, lstm)) for lstm in projected or beside}
    nearest = [lstm for lstm, depth in depths.items() if depth == max(depths.values())]
    if len(nearest) > 1:
        names = files.first_of(f"{lstm}{FIRST_LAYER}" for lstm in nearest)
        raise ValueError(f"{weights} has several LSTMs that may belong to {characters}{CHARACTER_ARRAY}: {names}.")
    return nearest[0] if nearest else None


def mixes_near(bilm: BiLM, bilms: list[BiLM], state: State) -> tuple[str, ...]:
    """The mixes with a scalar for each layer that are as near to this biLM as to any other; the nearest first."""
    num_scalars = how_many(bilm.arrays(state), LAYER_WEIGHT) + 1
    depths = {}
    for mix in beginnings(state, "scalar_parameters.0"):
        depth, *others = (len(common_modules(mix, f"{each.name}.")) for each in (bilm, *bilms))
        sizes = [state[name].numel() for name in mix_names(mix, state)]
        if depth == max(others) and sizes == [1] * num_scalars + [1]:  # and gamma
            depths[mix] = depth
    return tuple(sorted(depths, key=depths.__getitem__, reverse=True))


def mix_names(mix: str, state: State) -> list[str]:
    """The names of the scalars, a layer each, and of gamma."""
    scalars = f"{mix}scalar_parameters.{{}}"
    names = [scalars.format(layer) for layer in range(how_many(state, scalars))]
    return [name for name in (*names, f"{mix}gamma") if name in state]


def read_mix(mix: str, state: State) -> State:
    """The parameters of a `ScalarMix`."""
    *scalars, gamma = (state[name].float().reshape(1) for name in mix_names(mix, state))
    return {"weights": torch.cat(scalars), "gamma": gamma.clone()}


def with_mixes_of(bilm: BiLM, same: BiLM, state: State) -> BiLM:
    """A biLM with those mixes of the same biLM elsewhere that are different."""
    mixes = list(bilm.mixes)
    for mix in same.mixes:
        values = read_mix(mix, state)
        if not any(are_equal(values, read_mix(other, state)) for other in mixes):
            mixes.append(mix)
    return bilm._replace(mixes=tuple(mixes))


def are_equal(first: State, second: State) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def missing_part(state: State) -> str:
    """The part of a biLM without which there is none."""
    if tables := beginnings(state, CHARACTER_ARRAY):
        return f"{tables[0]}{CHARACTER_ARRAY} has no LSTM with {FIRST_LAYER} next to it"
    if lstms := beginnings(state, FIRST_PROJECTION):
        return f"{lstms[0]}{FIRST_PROJECTION} is in an LSTM of this kind, but no array is named {CHARACTER_ARRAY}"
    return f"no array is named {CHARACTER_ARRAY}"


def other_modules(names: Iterable[str], converted: Collection[str]) -> list[str]:
    """The largest modules of which nothing is converted, but each embedder of words by itself."""
    parents = set()
    for name in converted:
        parts = name.split(".")
        parents.update(".".join(parts[:depth]) for depth in range(len(parts)))
    modules = []
    for name in names:
        if name in converted:
            continue
        parts = name.split(".")
        depths = [depth for depth in range(1, len(parts)) if ".".join(parts[:depth]) not in parents] or [len(parts)]
        embedders = [depth for depth, part in enumerate(parts, 1) if part.startswith("token_embedder_")]
        modules.append(".".join(parts[: max(depths[0], *embedders[:1], 1)]))
    return list(dict.fromkeys(modules))
