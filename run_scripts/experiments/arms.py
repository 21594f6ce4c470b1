"""The arms of an experiment: ways to configure the network, such as with ELMo, without it, with other layer weights."""

from typing import Any, NamedTuple

from modeling_elmo.run_scripts.cards.tables import BASELINE_NAME, layer_names


class Arm(NamedTuple):
    """One way to configure the network.

    Args:
        name: the name in records and folders.
        overrides: fields of the configuration.
        fraction: the share of the training data.
    """

    name: str
    overrides: dict[str, Any]
    fraction: float = 1.0


BASELINE = Arm(BASELINE_NAME, {"use_elmo": False, "elmo_placement": "input", "freeze_bilm": True})
ABLATIONS = {
    "layers": [
        Arm("top layer", {"scalar_mix_mode": "top"}),
        Arm("average", {"scalar_mix_mode": "average"}),
        Arm("learned, lambda 1", {"scalar_mix_mode": "learned", "scalar_mix_l2": 1.0}),
        Arm("learned, lambda 0.001", {"scalar_mix_mode": "learned", "scalar_mix_l2": 0.001}),
    ],
    "placement": [Arm(place, {"elmo_placement": place}) for place in ("input", "output", "both")],
    "data": [Arm(f"elmo@{share}", {}, share) for share in (0.01, 0.1, 1.0)],
}


def experiment_arms(ablation: str | None, compare_baseline: bool, use_elmo: bool, num_layers: int) -> list[Arm]:
    """The arms that the options ask for. `num_layers` counts the biLM's biLSTM layers."""
    if not use_elmo:
        return [BASELINE]
    layers = enumerate(layer_names(num_layers + 1))
    each_layer = [Arm(name, {"scalar_mix_mode": number}) for number, name in layers]
    arms = {**ABLATIONS, "each_layer": each_layer}[ablation] if ablation else [Arm("elmo", {})]
    if not compare_baseline:
        return arms
    if ablation == "data":
        return [*arms, *(BASELINE._replace(name=f"baseline@{arm.fraction}", fraction=arm.fraction) for arm in arms)]
    return [BASELINE, *arms]
